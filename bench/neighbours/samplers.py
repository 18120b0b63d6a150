"""Tenants who sample more than their share: each `run` goes on until its process is killed."""

from __future__ import annotations

import asyncio

from bench.neighbours.trainers import runs
from cotrain import ModelInput, SamplingClient, SamplingParams


async def heavy_sampler(address: str, key: str) -> None:
    """20 requests in flight of 64 sequences of 1,900 tokens each."""
    (run,) = runs(address, key, count=1)
    sampler = await asyncio.to_thread(run.save_weights_and_get_sampling_client)
    prompt = ModelInput.from_ints(list(range(1, 33)))
    params = SamplingParams(max_tokens=1_900, seed=0, stop=[])

    async def one() -> None:
        while True:
            await sampler.sample(prompt, 64, params)

    await asyncio.gather(*(one() for _ in range(20)))


async def stop_strings(address: str, key: str) -> None:
    """20 requests in flight of 16 sequences, each looked through for 64 stop strings."""
    (run,) = runs(address, key, count=1)
    sampler = await asyncio.to_thread(run.save_weights_and_get_sampling_client)
    prompt = ModelInput.from_ints(list(range(1, 33)))
    stops = [f"this never comes {number}" for number in range(64)]
    params = SamplingParams(max_tokens=1_900, seed=0, stop=stops)

    async def one() -> None:
        while True:
            await sampler.sample(prompt, 16, params)

    await asyncio.gather(*(one() for _ in range(20)))


async def long_prompts(address: str, key: str) -> None:
    """20 requests in flight about prompts of 4,000 tokens, each with the 20 best at every position."""
    (run,) = runs(address, key, count=1)
    sampler = await asyncio.to_thread(run.save_weights_and_get_sampling_client)
    params = SamplingParams(max_tokens=1, seed=0, stop=[])

    async def one(number: int) -> None:
        prompt = ModelInput.from_ints([number + 1, *range(1, 4_000)])
        while True:
            await sampler.sample(prompt, 1, params, True, 20)

    await asyncio.gather(*(one(number) for number in range(20)))


async def many_adapters(address: str, key: str) -> None:
    """A request in flight to each of 128 adapters, more than a decoder has room for."""
    made = runs(address, key, count=8, rank=32)
    samplers = [
        await asyncio.to_thread(run.save_weights_and_get_sampling_client)
        for _ in range(16)
        for run in made
    ]
    prompt = ModelInput.from_ints(list(range(1, 33)))
    params = SamplingParams(max_tokens=16, seed=0, stop=[])

    async def one(sampler: SamplingClient) -> None:
        while True:
            await sampler.sample(prompt, 1, params)

    await asyncio.gather(*(one(sampler) for sampler in samplers))


SAMPLERS = {run.__name__: run for run in (heavy_sampler, stop_strings, long_prompts, many_adapters)}
