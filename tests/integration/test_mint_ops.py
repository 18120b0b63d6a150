"""Reverse KL and interpolation in the log of a run: with a real worker, and after it died."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_store import redis_keys
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.bodies.reverse_kl_body import KlArrays, ReverseKlBody, encode_reverse_kl
from cotrain_store.disk.storage import is_spooled
from cotrain_store.messages.ids import RequestId, SessionId, TenantId, WeightsRef, encode, run_id
from cotrain_store.messages.ops import OpKind, ResultKind
from cotrain_store.messages.runs import CheckpointRecord, LoraSpec, RunRecord, RunState
from cotrain_workers.engine.adapters.lifecycle import mix
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.checkpoints import saved_state
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.program import results
from tests.support.stack import MODEL, POOL, Stack, make_worker, worker

LORA = LoraSpec(rank=4, seed=7)
SMALL, LARGE = (6,), (450, 450)  # targets; the answer to the latter goes to the spool


def datum(seed: int, targets: int) -> KlArrays:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 512, 12 + targets)
    return KlArrays(tokens[:5], tokens[5:12], tokens[12:], np.ones(targets, np.float32))


async def pull(
    server: Stack,
    run: RunRecord,
    reference: WeightsRef | None,
    *,
    seq: int | None = None,
    seed: int = 0,
    targets: Sequence[int] = SMALL,
) -> RequestId:
    """Ask for a reverse KL; without a seq it rides."""
    body = ReverseKlBody(reference, 1.0, tuple(datum(seed, length) for length in targets))
    uses = [] if reference is None else [reference]
    return await server.intake.submit(
        *(run, seq, OpKind.REVERSE_KL, encode_reverse_kl(body), body.num_tokens, f"kl-{seed}"),
        uses=uses,
        idempotency_key=f"kl-{seed}",
    )


async def taught(server: Stack, name: str, lora: LoraSpec = LORA) -> CheckpointRecord:
    """Train a run for two steps and save it."""
    run = await server.create("a", name, lora)
    for step in range(2):
        data = sequences(step + len(name), 2, 9)
        await server.forward_backward(run, 2 * step + 1, data)
        await server.optim_step(run, 2 * step + 2)
    return await saved_state(server, run, 5)


async def distill(
    server: Stack, session: str, reference: WeightsRef, targets: Sequence[int]
) -> tuple[RunRecord, list[RequestId]]:
    """Send two steps of distillation whose passes ride, and a gradient that waits."""
    run = await server.create("a", session, LoraSpec(rank=3, seed=1))
    requests = []
    for step in range(2):
        requests.append(await pull(server, run, reference, seed=step, targets=targets))
        requests.append(await server.forward_backward(run, 2 * step + 1, sequences(step, 1, 9)))
        requests.append(await server.optim_step(run, 2 * step + 2))
    requests.append(await pull(server, run, None, seed=9, targets=targets))
    return run, requests


FAILPOINTS = [
    Failpoint("bodies", 1),
    Failpoint("commit", 1, after=True),
    Failpoint("commit", 2),
    Failpoint("commit", 2, after=True),
]


@pytest.mark.parametrize(
    ("failpoint", "targets"),
    [
        *((each, SMALL) for each in FAILPOINTS[1:3]),
        *(variant(each, SMALL) for each in (FAILPOINTS[0], FAILPOINTS[3])),
        variant(FAILPOINTS[2], LARGE),
    ],
)
async def test_a_worker_that_dies_leaves_no_trace_in_a_distillation(
    server: Stack,
    engine: Engine,
    failpoint: Failpoint,
    targets: Sequence[int],
) -> None:
    with worker(server, engine):
        teacher = await taught(server, "teacher")
        calm, calm_requests = await distill(server, "calm", teacher.weights, targets)
        expected = await results(server, calm, calm_requests)
    digest = engine.adapters.state(calm.id).digest()
    run, requests = await distill(server, "troubled", teacher.weights, targets)
    async with dying_worker(server, engine, failpoint):
        pass
    engine.adapters.drop(run.id)
    with worker(server, engine):
        assert await results(server, run, requests) == expected
    assert engine.adapters.state(run.id).digest() == digest
    assert expected[0]["metrics"]["reverse_kl:mean"] > 0


async def test_a_large_answer_is_whole(server: Stack, engine: Engine) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        result = await server.result(run, await pull(server, run, None, targets=LARGE))

    assert result.kind is ResultKind.JSON
    assert not is_spooled(result)
    outputs = result.json()["outputs"]
    assert tuple(len(output["token_losses"]["data"]) for output in outputs) == LARGE


async def test_what_a_step_pulls_to_stays_when_its_name_is_gone(server: Stack, engine: Engine, redis: Any) -> None:
    with worker(server, engine):
        teacher = await taught(server, "teacher")
    run = await server.create("a", "b", LORA)
    request = await pull(server, run, teacher.weights)
    redis.delete(redis_keys.checkpoint(teacher.run, teacher.kind, teacher.name))
    loop, opened = make_worker(server, engine)
    assert loop._weights.sweep() == []
    opened.close()
    with worker(server, engine):
        answer = (await server.result(run, request)).json()

    assert answer["metrics"]["num_tokens:sum"] == sum(SMALL)


async def interpolate(
    server: Stack, session: str, sources: Sequence[tuple[float, CheckpointRecord]], rank: int
) -> tuple[RunRecord, RequestId]:
    """Ask for a combination as the API does: a load that makes a run, and the save that ends it."""
    lora = LoraSpec(rank=rank, seed=7)
    run = RunRecord(
        *(run_id(SessionId(session), 0), TenantId("a"), SessionId(session), POOL, MODEL, lora), created_at=time.time()
    )
    refs = tuple(LoadSource(checkpoint.weights, factor) for factor, checkpoint in sources)
    load = encode(LoadRequest("x", refs, optimizer=False, lora=lora)).encode()
    uses = [source.ref for source in refs]
    await server.intake.create_run(run, kind=OpKind.LOAD, body=load, uses=uses)
    save = encode(SaveRequest("mixed", answer={"has_rank_shards": False}, last=True)).encode()
    return run, await server.intake.submit(run, 1, OpKind.SAVE, save, 0, "save")


@pytest.mark.parametrize("failpoint", [None, variant(FAILPOINTS[0]), FAILPOINTS[1]], ids=str)
async def test_an_interpolation_is_the_exact_mix_and_ends_its_run(
    server: Stack, engine: Engine, failpoint: Failpoint | None
) -> None:
    with worker(server, engine):
        one, other = [
            await taught(server, name, LoraSpec(rank=rank, seed=rank)) for name, rank in (("one", 4), ("other", 2))
        ]
    run, request = await interpolate(server, "mix", [(0.75, one), (0.25, other)], rank=6)
    if failpoint:
        async with dying_worker(server, engine, failpoint):
            pass
    with worker(server, engine) as loop:
        answer = (await server.result(run, request)).json()
        sources = [(0.75, loop._weights.host(one.weights)), (0.25, loop._weights.host(other.weights))]
        found = loop._weights.host(ref := WeightsRef(request))

    assert answer["path"] == f"tinker://{run.id}/sampler_weights/mixed"
    assert answer["has_rank_shards"] is False
    assert torch.equal(found.flat, mix(sources, engine.adapters.layout_of).flat)
    assert (await server.records.run(run.tenant, run.id)).state is RunState.CLOSED
    assert (await server.records.checkpoint(run.tenant, answer["path"])).weights == ref
