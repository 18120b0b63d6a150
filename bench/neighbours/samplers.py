"""Tenants who sample more than their share: each `run` goes on until its process is killed."""

from __future__ import annotations

import asyncio

from bench.neighbours.trainers import runs
from cotrain import ModelInput, SamplingParams


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


SAMPLERS = {run.__name__: run for run in (heavy_sampler, stop_strings)}
