"""Client steps of sampling on the store, with a real worker: save, make samplers, sample."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from cotrain.wire.proto import wire_pb2
from cotrain_store.bodies.adapter_bodies import SaveRequest
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.messages.ids import RequestId, SessionId, TenantId, encode, sampler_id
from cotrain_store.messages.ops import OpKind, Result, ResultKind
from cotrain_store.messages.runs import RunRecord, SamplerRecord
from tests.support.samples import BODY
from tests.support.stack import MODEL, POOL, Stack

#: Request that is long enough to be interrupted.
LONG = replace(BODY, max_tokens=200, stop=(), prompt=tuple(range(1, 40)))
SHORT = replace(BODY, max_tokens=12, stop=(), prompt=(5, 6, 7, 8), num_samples=2)


async def base_sampler(server: Stack, tenant: str = "a", number: int = 0) -> SamplerRecord:
    """Make a sampler of the base model."""
    session = SessionId(tenant)
    record = SamplerRecord(
        sampler_id(session, number), TenantId(tenant), session, POOL, MODEL, None, None,
        ephemeral=False, created_at=time.time(),
    )  # fmt: skip
    return await server.records.create_sampler(record)


async def submit_save(
    server: Stack, run: RunRecord, seq: int, *, name: str | None = None, number: int = 0
) -> RequestId:
    """Submit a save under a name, or as the n-th sampler of the run's session."""
    sampler = None if name else sampler_id(run.session, number)
    body = encode(SaveRequest(name=name, sampler=sampler)).encode()
    return await server.intake.submit(run, seq, OpKind.SAVE, body, 0, digest=f"{seq}")


async def saved_sampler(server: Stack, run: RunRecord, seq: int, *, number: int = 0) -> SamplerRecord:
    """Save a run's weights for sampling, and wait for the sampler."""
    result = await server.result(run, await submit_save(server, run, seq, number=number))
    return await server.records.sampler(run.tenant, result.json()["sampling_session_id"])


async def named_sampler(server: Stack, run: RunRecord, path: str, *, number: int = 0) -> SamplerRecord:
    """Make a sampler of weights that were saved under a name."""
    checkpoint = await server.records.checkpoint(run.tenant, path)
    record = SamplerRecord(
        sampler_id(run.session, number), run.tenant, run.session, POOL, MODEL, path,
        checkpoint.weights, ephemeral=False, created_at=time.time(),
    )  # fmt: skip
    return await server.records.create_sampler(record)


async def submit_sample(
    server: Stack, sampler: SamplerRecord, seq: int, body: SampleBody = SHORT, **changes: Any
) -> RequestId:
    """Submit a sample request."""
    return await server.samples.submit(sampler, seq, replace(body, **changes))


async def sample(server: Stack, sampler: SamplerRecord, seq: int, body: SampleBody = SHORT, **changes: Any) -> bytes:
    """Submit a sample request. Return its result."""
    request = await submit_sample(server, sampler, seq, body, **changes)
    return await sampled(server, sampler, request)


async def sampled(server: Stack, sampler: SamplerRecord, request: RequestId) -> bytes:
    """Wait for samples. Return them as bytes, without the number of cached tokens and the run, which may differ."""
    result = await ended(server, sampler, request)
    assert result.kind is ResultKind.SAMPLE, result.payload
    response = wire_pb2.SampleResponse.FromString(result.payload)
    response.prompt_cache_hit_tokens = 0
    for span in (span for sequence in response.sequences for span in sequence.policy_spans):
        span.training_run_id = ""
    return response.SerializeToString(deterministic=True)


async def ended(server: Stack, sampler: SamplerRecord, request: RequestId) -> Result:
    """Wait for the result of a sample request, of any kind."""
    result = await server.futures.wait(sampler.tenant, request, 300)
    assert isinstance(result, Result), f"{request} did not resolve: {result}"
    return result
