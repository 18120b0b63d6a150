"""Tenants that train more than their share. Each function runs until its process is killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from bench.support.serving import ADAM, random_data
from cotrain import APIError, Datum, Future, ModelInput, SamplingParams, ServiceClient, TrainingClient


async def long_pass(address: str, key: str) -> None:
    """Train one run with two passes of 140,000 tokens in flight, in sequences of 2,000."""
    (run,) = runs(address, key, count=1)
    await keep_training(run, random_data(70, 2_000, seed=0), in_flight=2)


async def long_datum(address: str, key: str) -> None:
    """Train one run with two passes of a single datum of 8,192 tokens in flight."""
    (run,) = runs(address, key, count=1)
    await keep_training(run, random_data(1, 8_192, seed=0), in_flight=2)


async def many_runs(address: str, key: str) -> None:
    """Train 64 runs, each with three steps of 1,024 tokens in flight."""
    batch = random_data(8, 128, seed=0)
    await together(keep_training(run, batch, 3) for run in runs(address, key, count=64))


async def burst(address: str, key: str) -> None:
    """Send as many small passes as a tenant's queue accepts, from eight runs, without an optimizer step."""
    batch = random_data(1, 64, seed=0)
    await together(keep_training(run, batch, in_flight=64, steps=False) for run in runs(address, key, count=8))


async def reinforcement(address: str, key: str) -> None:
    """Run `rl_basic` of the cookbook with its defaults: sample 128 groups of 16, then train on all of them."""
    (run,) = runs(address, key, count=1)
    prompt = ModelInput.from_ints(list(range(1, 33)))
    params = SamplingParams(max_tokens=256, seed=0, stop=[])
    while True:
        sampler = await asyncio.to_thread(run.save_weights_and_get_sampling_client)
        await together(awaited(sampler.sample(prompt, 16, params)) for _ in range(128))
        batch = random_data(16, 288, seed=0)
        passes = [await run.forward_backward_async(batch, "cross_entropy") for _ in range(32)]
        await (await run.optim_step_async(ADAM))
        await together(awaited(done) for done in passes)


async def saver(address: str, key: str) -> None:
    """Write a checkpoint after every small step, in eight runs."""
    batch = random_data(1, 64, seed=0)

    async def one(run: TrainingClient) -> None:
        number = 0
        while True:
            await (await run.forward_backward_async(batch, "cross_entropy"))
            await (await run.optim_step_async(ADAM))
            await (await run.save_state_async(f"step-{number}"))
            number += 1

    await together(one(run) for run in runs(address, key, count=8))


async def large_adapters(address: str, key: str) -> None:
    """Train eight runs of rank 128 on a model not much larger than one of these adapters."""
    batch = random_data(1, 64, seed=0)
    await together(keep_training(run, batch, 2) for run in runs(address, key, count=8, rank=128))


async def creator(address: str, key: str) -> None:
    """Create and unload runs of rank 64 as fast as the server allows, 16 at a time."""
    service = ServiceClient(base_url=address, api_key=key)

    def one(number: int) -> None:
        while True:
            service.create_lora_training_client("bench", rank=64, seed=number).unload()

    await together(asyncio.to_thread(one, number) for number in range(16))


async def loader(address: str, key: str) -> None:
    """Load a checkpoint with its optimizer repeatedly in eight runs of rank 128, with 60 loads in flight each."""

    async def one(run: TrainingClient) -> None:
        await (await run.forward_backward_async(random_data(1, 64, seed=0), "cross_entropy"))
        await (await run.optim_step_async(ADAM))
        path = (await (await run.save_state_async("kept", overwrite=True))).path
        flying = []
        while True:
            flying.append(await run.load_state_with_optimizer_async(path))
            if len(flying) == 60:
                await flying.pop(0)

    await together(one(run) for run in runs(address, key, count=8, rank=128))


async def downloader(address: str, key: str) -> None:
    """Download the files of a checkpoint of rank 128 repeatedly, 64 times in parallel."""
    (run,) = runs(address, key, count=1, rank=128)
    path = (await (await run.save_state_async("kept", overwrite=True))).path
    rest = ServiceClient(base_url=address, api_key=key).create_rest_client()
    limits = httpx.Limits(max_connections=None)

    async def read() -> None:
        while True:
            link = await rest.get_checkpoint_archive_url_from_tinker_path(path)
            async with http.stream("GET", link.url) as answer:
                async for _ in answer.aiter_raw():
                    pass

    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        await asyncio.gather(*(read() for _ in range(64)))


async def awaited(future: Future[Any]) -> None:
    """Wait for a result."""
    await future


async def together(tenants: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run them concurrently; a rejection, for instance by a quota, is printed and does not stop the others."""
    for ended in asyncio.as_completed(list(tenants)):
        try:
            await ended
        except APIError as refused:
            print(refused, file=sys.stderr, flush=True)


async def keep_training(run: TrainingClient, batch: list[Datum], in_flight: int, *, steps: bool = True) -> None:
    """Keep `in_flight` passes in flight, each followed by an optimizer step if `steps` is set."""
    flying: list[Future[Any]] = []
    while True:
        flying.append(await run.forward_backward_async(batch, "cross_entropy"))
        if steps:
            flying.append(await run.optim_step_async(ADAM))
        while len(flying) >= in_flight * (1 + steps):
            await flying.pop(0)


def runs(address: str, key: str, *, count: int, rank: int = 8) -> list[TrainingClient]:
    """Return new runs of one session. Fails if a quota rejects a run."""
    service = ServiceClient(base_url=address, api_key=key)

    def make(seed: int) -> TrainingClient:
        return service.create_lora_training_client("bench", rank=rank, seed=seed)

    # Concurrently, within few cycles, so that the probes meet all runs.
    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(make, range(count))]


TRAINERS = {
    run.__name__: run
    for run in (
        long_pass, long_datum, many_runs, burst, reinforcement, saver, large_adapters, creator, loader, downloader,
    )
}  # fmt: skip
