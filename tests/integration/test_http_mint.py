"""mint's extensions: requests over HTTP, their seq and rejections, and reverse KL and interpolation by a real worker."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from cotrain_store import redis_keys
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.bodies.reverse_kl_body import KlArrays, ReverseKlBody, decode_reverse_kl, encode_reverse_kl
from cotrain_store.disk.stored_results import is_spooled
from cotrain_store.messages.ids import RequestId, RunId, SessionId, TenantId, WeightsRef, encode, run_id
from cotrain_store.messages.ops import OpKind, QueuedOp, ResultKind
from cotrain_store.messages.runs import CheckpointRecord, LoraSpec, RunRecord, RunState
from cotrain_workers.engine.adapters.lifecycle import mix
from cotrain_workers.engine.engine import Engine
from tests.support import stack
from tests.support.bodies import sequences
from tests.support.checkpoint_requests import LOCKED
from tests.support.checkpoints import saved_state
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.http_api import ALICE, BOB, POOL, Api, pass_body, running_api
from tests.support.kl_bodies import kl_body
from tests.support.program import results
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import MODEL, Stack, make_worker, worker
from tests.support.stand_in import StandIn, stand_in

KL = "mint/forward_backward_reverse_kl"
MIX = "mint/checkpoints/interpolate"
NOT_FOUND = "tinker://nobody:train:0/sampler_weights/no"


async def pull(api: Api, run: str, **changes: Any) -> httpx.Response:
    key, headers = changes.pop("key", ALICE), changes.pop("headers", {})
    return await api.post(KL, kl_body(run, **changes), key, headers=headers)


async def interpolated(api: Api, paths: list[str], coefficients: list[float], **more: Any) -> httpx.Response:
    key = more.pop("key", ALICE)
    return await api.post(MIX, {"source_paths": paths, "coefficients": coefficients, **more}, key)


async def logged(api: Api, run: str) -> dict[int, QueuedOp]:
    """Return the pending and finished ops of a run, by seq."""
    rows = await api.services.connection.hgetall(redis_keys.ops(POOL.id, RunId(run)))
    return {int(seq): QueuedOp.parse(RunId(run), int(seq), op.decode()) for seq, op in rows.items()}


async def body_of(api: Api, run: str, seq: int) -> bytes:
    body: bytes = await api.services.connection.hget(redis_keys.bodies(POOL.id, RunId(run)), str(seq))
    return body


async def saved(api: Api, worker: StandIn, run: str, kind: str = "", **more: Any) -> str:
    """Save a run's weights. Return their path."""
    key = more.pop("key", ALICE)
    endpoint = f"save_weights{kind}"
    body = {"model_id": run, "seq_id": 1, "path": "a", **more}
    answer = await api.post(endpoint, body, key)
    assert answer.status_code == 200, answer.text
    await worker.run_log()
    path: str = (await result(api, answer, key))["path"]
    return path


async def result(api: Api, answer: httpx.Response, key: str = ALICE) -> Any:
    assert answer.status_code == 200, answer.text
    return (await api.post("retrieve_future", answer.json(), key)).json()


async def test_without_a_number_a_request_follows_all_requests_sent_before(api: Api) -> None:
    run = await api.new_run()
    await api.post("forward_backward", pass_body(run, 1))
    answer = await pull(api, run)
    await api.post("forward_backward", pass_body(run, 2))

    assert answer.json() == {"request_id": f"{run}:2", "model_id": run}
    kinds = {seq: op.kind for seq, op in (await logged(api, run)).items()}
    assert kinds == {0: OpKind.CREATE, 1: OpKind.FORWARD_BACKWARD, 2: OpKind.REVERSE_KL, 3: OpKind.FORWARD_BACKWARD}


async def test_with_a_number_a_request_takes_that_seq(api: Api) -> None:
    run = await api.new_run()
    one, again = await pull(api, run, seq_id=3), await pull(api, run, seq_id=3)

    assert one.json() == again.json() == {"request_id": f"{run}:3", "model_id": run}


async def test_a_repeat_with_the_same_idempotency_key_is_the_same_request(api: Api) -> None:
    run, key = await api.new_run(), {"X-Idempotency-Key": "stainless-python-retry-1"}
    one, again = await pull(api, run, headers=key), await pull(api, run, headers=key)
    other = await pull(api, run, headers={"X-Idempotency-Key": "stainless-python-retry-2"})

    assert one.json() == again.json() != other.json()
    assert (await logged(api, run)).keys() == {0, 1, 2}


async def test_the_base_model_is_a_reference_without_weights(api: Api) -> None:
    run = await api.new_run()
    await pull(api, run, temperature=0.5)

    body = decode_reverse_kl(await body_of(api, run, 1))
    assert (body.reference, body.temperature) == (None, 0.5)
    assert (await logged(api, run))[1].tokens == body.num_tokens == 7


@pytest.mark.parametrize("kind", ["", "_for_sampler"])
async def test_a_checkpoint_used_as_a_reference_is_kept(api: Api, worker: StandIn, kind: str) -> None:
    teacher, run = await api.new_run(), await api.new_run()
    path = await saved(api, worker, teacher, kind)
    await pull(api, run, reference_model_path=path)

    reference = decode_reverse_kl(await body_of(api, run, 1)).reference
    assert reference == f"{teacher}:1"
    users = await api.services.connection.smembers(redis_keys.weights_users(reference))
    assert any(f"{run}:1" in user.decode() for user in users)


async def test_a_published_checkpoint_is_a_reference_for_every_tenant(api: Api, worker: StandIn) -> None:
    teacher, run = await api.new_run(), await api.new_run(BOB)
    path = await saved(api, worker, teacher)
    hidden = await pull(api, run, reference_model_path=path, key=BOB)
    published = await api.http.post(
        f"/api/v1/training_runs/{teacher}/checkpoints/weights/a/publish", headers={"X-API-Key": ALICE}
    )
    assert published.status_code < 300, published.text
    await pull(api, run, reference_model_path=path, key=BOB)
    await worker.run_log()

    assert (await result(api, hidden, BOB))["error"] == "reference_model_path: Checkpoint not found."
    assert decode_reverse_kl(await body_of(api, run, 2)).reference == f"{teacher}:1"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (NOT_FOUND, "reference_model_path: Checkpoint not found."),
        ("mint://teacher-step-0010", "is neither a tinker:// path nor tiny/model"),
        ("other/model", "is neither a tinker:// path nor tiny/model"),
        ("tinker://a/../b", "reference_model_path: "),
        (None, "reference_model_path: Input should be a valid string"),
        ("", "reference_model_path: "),
    ],
)
async def test_an_invalid_reference_takes_its_seq_and_fails(
    api: Api, worker: StandIn, path: str | None, message: str
) -> None:
    run = await api.new_run()
    answer = await pull(api, run, reference_model_path=path)
    await worker.run_log()

    assert (await logged(api, run))[1].kind is OpKind.REJECTED
    failure = await result(api, answer)
    assert failure["category"] == "user"
    assert message in failure["error"]


async def test_an_encrypted_checkpoint_cannot_be_a_reference(api: Api, worker: StandIn) -> None:
    teacher, run = await api.new_run(), await api.new_run()
    path = await saved(api, worker, teacher, "_external", **LOCKED)
    answer = await pull(api, run, reference_model_path=path)
    await worker.run_log()

    assert "for download only" in (await result(api, answer))["error"]


@pytest.mark.parametrize("body", [{}, {"model_id": 3}, {"model_id": "x", "seq_id": "y"}])
async def test_a_reverse_kl_without_a_run_is_rejected(api: Api, body: dict[str, Any]) -> None:
    assert (await api.post(KL, body)).status_code == 400


async def test_an_interpolation_is_a_new_run(api: Api, worker: StandIn) -> None:
    runs = [await api.new_run(rank=rank) for rank in (4, 8)]
    paths = [await saved(api, worker, run) for run in runs]
    answer = await interpolated(api, paths, [0.25, 0.75], output_path="ema")
    run = answer.json()["model_id"]
    load = LoadRequest.parse(await body_of(api, run, 0))
    assert [source.coefficient for source in load.sources] == [0.25, 0.75]
    assert load.lora is not None
    await worker.run_log()

    assert await result(api, answer) == {
        "path": f"tinker://{run}/sampler_weights/ema",
        "checkpoint_type": "sampler",
        "source_paths": paths,
        "coefficients": [0.25, 0.75],
        "has_rank_shards": False,
        "type": "mint_interpolate_checkpoints",
    }
    closed = await api.post("forward_backward", pass_body(run, 2))
    assert closed.status_code == 400
    info = (await api.post("get_info", {"model_id": run})).json()
    assert info["lora_rank"] == load.lora.rank


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"source_paths": []}, 400),
        ({"source_paths": 3}, 422),
        ({"coefficients": [1.0, 2.0]}, 400),
        ({"coefficients": ["x"]}, 422),
        ({"output_path": "a/b"}, 400),
        ({"output_path": "tinker://r/sampler_weights/a"}, 400),
        ({"output_checkpoint_type": "weights"}, 422),
        ({"source_paths": [NOT_FOUND]}, 404),
        ({"source_paths": ["x"]}, 400),
    ],
)
async def test_an_invalid_interpolation_is_rejected_at_once(
    api: Api, worker: StandIn, changes: dict[str, Any], status: int
) -> None:
    path = await saved(api, worker, await api.new_run())
    body = {"source_paths": [path], "coefficients": [1.0], **changes}

    answer = await api.post(MIX, body)

    assert answer.status_code == status, answer.text
    assert len(await api.services.connection.keys("cotrain:run:*:train:0")) == 1


async def test_a_sum_of_ranks_over_the_limit_is_rejected(api: Api, worker: StandIn) -> None:
    path = await saved(api, worker, await api.new_run())  # of a worker whose adapters have rank 4
    most = POOL.max_rank // 4

    answer = await interpolated(api, [path] * (most + 1), [0.1] * (most + 1))

    assert answer.status_code == 400
    assert answer.json()["detail"] == (
        f"The ranks of the sources add up to {4 * (most + 1)}: rank must be between 1 and {POOL.max_rank}."
    )
    assert (await interpolated(api, [path] * most, [0.1] * most)).status_code == 200


async def test_over_the_checkpoint_quota_interpolations_are_rejected(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"checkpoints": 1}) as api:
        with stand_in(api.services) as worker:
            path = await saved(api, worker, await api.new_run())
            answer = await interpolated(api, [path], [1.0])

    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("Checkpoint storage quota reached (1 checkpoints).")


async def test_a_queue_with_space_for_half_an_interpolation_leaves_no_run(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"ops": 2}) as api:
        with stand_in(api.services) as worker:
            path = await saved(api, worker, await api.new_run())
            waiting = await api.new_run()
            answer = await interpolated(api, [path], [1.0])
            assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
            listed = (await api.get("training_runs")).json()["training_runs"]
            assert listed[0]["training_run_id"] == waiting
            await worker.run_log()
            assert (await interpolated(api, [path], [1.0])).status_code == 200


async def test_a_large_request_is_accepted(api: Api) -> None:
    run = await api.new_run()
    body = kl_body(run, data=kl_body(run)["data"] * 2_000)
    assert len(json.dumps(body)) > 300_000

    assert (await api.post(KL, body)).status_code == 200
    assert (await logged(api, run))[1].ref != "inline"


LORA = LoraSpec(rank=4, seed=7)
SMALL, LARGE = (6,), (450, 450)  # targets; the answer to the latter goes to the spool


def datum(seed: int, targets: int) -> KlArrays:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 512, 12 + targets)
    return KlArrays(tokens[:5], tokens[5:12], tokens[12:], np.ones(targets, np.float32))


async def submit_reverse_kl(
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
        requests.append(await submit_reverse_kl(server, run, reference, seed=step, targets=targets))
        requests.append(await server.forward_backward(run, 2 * step + 1, sequences(step, 1, 9)))
        requests.append(await server.optim_step(run, 2 * step + 2))
    requests.append(await submit_reverse_kl(server, run, None, seed=9, targets=targets))
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
    server: Stack, engine: Engine, failpoint: Failpoint, targets: Sequence[int]
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
        result = await server.result(run, await submit_reverse_kl(server, run, None, targets=LARGE))

    assert result.kind is ResultKind.JSON
    assert not is_spooled(result)
    outputs = result.json()["outputs"]
    assert tuple(len(output["token_losses"]["data"]) for output in outputs) == LARGE


async def test_what_a_step_pulls_to_stays_when_its_name_is_gone(server: Stack, engine: Engine, redis: Any) -> None:
    with worker(server, engine):
        teacher = await taught(server, "teacher")
    run = await server.create("a", "b", LORA)
    request = await submit_reverse_kl(server, run, teacher.weights)
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
        *(run_id(SessionId(session), 0), TenantId("a"), SessionId(session), stack.POOL, MODEL, lora),
        created_at=time.time(),
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
