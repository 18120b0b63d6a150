"""Client steps on the store, with a real worker: save the state of a run and continue from it."""

from __future__ import annotations

import time
from typing import Any

from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.messages.ids import RequestId, SessionId, TenantId, encode, run_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import CheckpointRecord, LoraSpec, RunRecord
from tests.support.program import LORA
from tests.support.stack import MODEL, POOL, Stack


async def submit_state(server: Stack, run: RunRecord, seq: int, name: str = "x", **changes: Any) -> RequestId:
    """Submit a save of the training state. `changes` are fields of its request."""
    body = encode(SaveRequest(name=name, kind="weights", **changes)).encode()
    return await server.intake.submit(run, seq, OpKind.SAVE, body, 0, digest=f"{seq}")


async def checkpoint_of(server: Stack, run: RunRecord, request: RequestId) -> CheckpointRecord:
    """Wait for a save. Return its checkpoint."""
    result = (await server.result(run, request)).json()
    assert "path" in result, result
    return await server.records.checkpoint(run.tenant, result["path"])


async def saved_state(server: Stack, run: RunRecord, seq: int, name: str = "x", **changes: Any) -> CheckpointRecord:
    """Save a run's state and wait for it."""
    request = await submit_state(server, run, seq, name, **changes)
    return await checkpoint_of(server, run, request)


async def submit_load(
    server: Stack, run: RunRecord, seq: int, checkpoint: CheckpointRecord, *, optimizer: bool = True
) -> RequestId:
    """Submit a load, which replaces the state of a run by a checkpoint."""
    body, uses = _load_body(checkpoint, optimizer, None), [checkpoint.weights]
    return await server.intake.submit(run, seq, OpKind.LOAD, body, 0, digest=f"{seq}", uses=uses)


async def run_from(
    server: Stack,
    tenant: str,
    session: str,
    checkpoint: CheckpointRecord,
    *,
    optimizer: bool = True,
    lora: LoraSpec = LORA,
) -> RunRecord:
    """Submit a new run that starts from a checkpoint."""
    run = RunRecord(
        run_id(SessionId(session), 0), TenantId(tenant), SessionId(session), POOL, MODEL, lora,
        time.time(),
    )  # fmt: skip
    body, uses = _load_body(checkpoint, optimizer, lora), [checkpoint.weights]
    await server.intake.create_run(run, kind=OpKind.LOAD, body=body, uses=uses)
    return run


def _load_body(checkpoint: CheckpointRecord, optimizer: bool, lora: LoraSpec | None) -> bytes:
    sources = (LoadSource(checkpoint.weights),)
    return encode(LoadRequest(checkpoint.path, sources, optimizer, lora)).encode()
