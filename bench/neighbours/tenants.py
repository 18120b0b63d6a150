"""Tenants that train or sample more than their share: `TENANTS` by name. Each function runs until its process is killed."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from bench.support.serving import ADAM, random_data
from cotrain import APIError, Datum, Future, ModelInput, SamplingClient, SamplingParams, ServiceClient, TrainingClient

#: Sample requests in flight of one neighbour.
AT_ONCE = 20
PROMPT = ModelInput.from_ints(list(range(1, 33)))


# ---- Training -------------------------------------------------------------------------------------


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
    params = SamplingParams(max_tokens=256, seed=0, stop=[])
    while True:
        sampler = await asyncio.to_thread(run.save_weights_and_get_sampling_client)
        await together(awaited(sampler.sample(PROMPT, 16, params)) for _ in range(128))
        batch = random_data(16, 288, seed=0)
        passes = [await run.forward_backward_async(batch, "cross_entropy") for _ in range(32)]
        await (await run.optim_step_async(ADAM))
        await together(awaited(done) for done in passes)


async def saver(address: str, key: str) -> None:
    """Write a checkpoint after every small step, in eight runs."""

    async def one(run: TrainingClient) -> None:
        for number in itertools.count():
            await step(run)
            await (await run.save_state_async(f"step-{number}"))

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
        await step(run)
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

    async def read() -> None:
        while True:
            link = await rest.get_checkpoint_archive_url_from_tinker_path(path)
            async with http.stream("GET", link.url) as answer:
                async for _ in answer.aiter_raw():
                    pass

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(read() for _ in range(64)))


async def awaited(future: Future[Any]) -> None:
    await future


async def step(run: TrainingClient) -> None:
    await (await run.forward_backward_async(random_data(1, 64, seed=0), "cross_entropy"))
    await (await run.optim_step_async(ADAM))


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
    # Concurrently, within few cycles, so that the probes meet all runs.
    with ThreadPoolExecutor(count) as threads:
        made = threads.map(
            lambda seed: service.create_lora_training_client("bench", rank=rank, seed=seed), range(count)
        )
        return [*made]


# ---- Sampling -------------------------------------------------------------------------------------


async def heavy_sampler(address: str, key: str) -> None:
    """Keep 20 requests in flight of 64 sequences of 1,900 tokens each."""
    params = SamplingParams(max_tokens=1_900, seed=0, stop=[])
    await keep_asking(await sampler_of(address, key), [(PROMPT, 64, params)] * AT_ONCE)


async def stop_strings(address: str, key: str) -> None:
    """Keep 20 requests in flight of 16 sequences, each searched for 64 stop strings."""
    params = SamplingParams(max_tokens=1_900, seed=0, stop=[f"this never comes {number}" for number in range(64)])
    await keep_asking(await sampler_of(address, key), [(PROMPT, 16, params)] * AT_ONCE)


async def long_prompts(address: str, key: str) -> None:
    """Keep 20 requests in flight about prompts of 4,000 tokens, each with the 20 best at every position."""
    params = SamplingParams(max_tokens=1, seed=0, stop=[])
    prompts = (ModelInput.from_ints([at + 1, *range(1, 4_000)]) for at in range(AT_ONCE))
    await keep_asking(await sampler_of(address, key), [(prompt, 1, params, True, 20) for prompt in prompts])


async def many_adapters(address: str, key: str) -> None:
    """Keep a request in flight to each of 128 adapters, more than a decoder has room for."""
    made = runs(address, key, count=8, rank=32)
    samplers = [await asyncio.to_thread(run.save_weights_and_get_sampling_client) for _ in range(16) for run in made]
    params = SamplingParams(max_tokens=16, seed=0, stop=[])
    await asyncio.gather(*(keep_asking(sampler, [(PROMPT, 1, params)]) for sampler in samplers))


async def hostile_grammars(address: str, key: str) -> None:
    """Keep 20 chats in flight, each with a new schema that takes long to compile or to follow."""
    numbers = itertools.count()

    def schema(at: int) -> dict[str, Any]:
        properties = {f"p{at}_{each}": {"type": "string"} for each in range(500)}
        kinds = (
            {"enum": [f"value {at} of a long list, number {each}" for each in range(1_500)]},
            {"type": "object", "properties": properties},
            {"type": "string", "pattern": f".*[ab].{{{8 + at % 8}}}[cd].*{at}"},
            _nested(at, depth=40),
            {"allOf": [{"type": "string", "pattern": f".*a.{{{each}}}b.*"} for each in range(12)]},
        )
        return kinds[at % len(kinds)]

    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{address}/oai/api/v1/", headers=headers, timeout=None) as http:
        model = (await http.get("models")).json()["data"][0]["id"]
        chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 64}

        async def one() -> None:
            while True:
                wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(next(numbers))}}
                await http.post("chat/completions", json={**chat, "response_format": wanted})

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))


def _nested(at: int, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"const": at}
    for level in range(depth):
        found = {"type": "object", "properties": {f"k{level}": found}, "required": [f"k{level}"]}
    return found


async def sampler_of(address: str, key: str) -> SamplingClient:
    (run,) = runs(address, key, count=1)
    return await asyncio.to_thread(run.save_weights_and_get_sampling_client)


async def keep_asking(sampler: SamplingClient, requests: Iterable[tuple[Any, ...]]) -> None:
    """Repeat each request concurrently; a request is the arguments of `sample`."""

    async def one(*arguments: Any) -> None:
        while True:
            await sampler.sample(*arguments)

    await asyncio.gather(*(one(*request) for request in requests))


TENANTS = {
    run.__name__: run
    for run in (
        long_pass, long_datum, many_runs, burst, reinforcement, saver, large_adapters, creator, loader, downloader,
        heavy_sampler, stop_strings, long_prompts, many_adapters, hostile_grammars,
    )
}  # fmt: skip
