"""Tenants that sample more than their share. Each function runs until its process is killed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import httpx

from bench.neighbours.trainers import runs
from cotrain import ModelInput, SamplingClient, SamplingParams

AT_ONCE = 20
PROMPT = ModelInput.from_ints(list(range(1, 33)))


async def heavy_sampler(address: str, key: str) -> None:
    """Keep 20 requests in flight of 64 sequences of 1,900 tokens each."""
    sampler = await sampler_of(address, key)
    params = SamplingParams(max_tokens=1_900, seed=0, stop=[])
    await keep_asking((sampler, PROMPT, 64, params) for _ in range(AT_ONCE))


async def stop_strings(address: str, key: str) -> None:
    """Keep 20 requests in flight of 16 sequences, each searched for 64 stop strings."""
    sampler = await sampler_of(address, key)
    stops = [f"this never comes {number}" for number in range(64)]
    params = SamplingParams(max_tokens=1_900, seed=0, stop=stops)
    await keep_asking((sampler, PROMPT, 16, params) for _ in range(AT_ONCE))


async def long_prompts(address: str, key: str) -> None:
    """Keep 20 requests in flight about prompts of 4,000 tokens, each with the 20 best at every position."""
    sampler = await sampler_of(address, key)
    params = SamplingParams(max_tokens=1, seed=0, stop=[])
    prompts = (ModelInput.from_ints([at + 1, *range(1, 4_000)]) for at in range(AT_ONCE))
    await keep_asking((sampler, prompt, 1, params, True, 20) for prompt in prompts)


async def many_adapters(address: str, key: str) -> None:
    """Keep a request in flight to each of 128 adapters, more than a decoder has room for."""
    made = runs(address, key, count=8, rank=32)
    samplers = [await asyncio.to_thread(run.save_weights_and_get_sampling_client) for _ in range(16) for run in made]
    params = SamplingParams(max_tokens=16, seed=0, stop=[])
    await keep_asking((sampler, PROMPT, 1, params) for sampler in samplers)


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
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=None) as http:
        model = (await http.get("/oai/api/v1/models")).json()["data"][0]["id"]
        messages = [{"role": "user", "content": "a"}]

        async def one() -> None:
            while True:
                wrapped = {"name": "s", "schema": schema(next(numbers))}
                wanted = {"type": "json_schema", "json_schema": wrapped}
                body = {
                    "model": model, "messages": messages, "max_tokens": 64, "response_format": wanted,
                }  # fmt: skip
                await http.post("/oai/api/v1/chat/completions", json=body)

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))


def _nested(at: int, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"const": at}
    for level in range(depth):
        properties = {f"k{level}": found}
        found = {"type": "object", "properties": properties, "required": [f"k{level}"]}
    return found


async def sampler_of(address: str, key: str) -> SamplingClient:
    """Return a sampler of a new adapter."""
    (run,) = runs(address, key, count=1)
    return await asyncio.to_thread(run.save_weights_and_get_sampling_client)


async def keep_asking(requests: Iterable[tuple[Any, ...]]) -> None:
    """Repeat each request: a sampler, and the arguments of its `sample`."""

    async def one(sampler: SamplingClient, *arguments: Any) -> None:
        while True:
            await sampler.sample(*arguments)

    await asyncio.gather(*(one(*request) for request in requests))


SAMPLERS = {run.__name__: run for run in (heavy_sampler, stop_strings, long_prompts, many_adapters, hostile_grammars)}
