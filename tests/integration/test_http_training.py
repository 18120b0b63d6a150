"""Training over HTTP and a real Redis: accepted requests, rejections and results."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import tinker
import zstandard

from cotrain.wire.codec import PROTOBUF, decode_pass_output
from cotrain_server.requests.passes import read_json_pass
from cotrain_store import redis_keys
from cotrain_store.bodies.pass_body import encode_pass_output, parse_pass
from cotrain_store.messages.ids import RequestId, RunId
from cotrain_store.messages.ops import Result, ResultKind
from tests.support.http_api import ALICE, POOL, SOON_S, Api, pass_body, running_api
from tests.support.redis_server import EmbeddedRedis


async def finish(api: Api, request_id: str, result: Result) -> None:
    """Resolve a future, as a worker's commit does."""
    redis = api.services.connection
    await redis.set(redis_keys.result(RequestId(request_id)), result.encode())
    await redis.publish(redis_keys.notify_results(), request_id)


async def kinds(api: Api, run: RunId) -> dict[int, str]:
    raw = await api.services.connection.hgetall(redis_keys.ops(POOL.id, run))
    return {int(seq): op.decode() for seq, op in raw.items()}


async def test_a_request_without_a_seq_follows_all_requests_sent_before(api: Api) -> None:
    run = await api.new_run()
    unplaced = {key: value for key, value in pass_body(run, 1).items() if key != "seq_id"}
    binary = read_json_pass(json.dumps(unplaced).encode(), forward_only=False).body
    assert parse_pass(binary).seq_id == 0
    step = {"model_id": run, "adam_params": {"learning_rate": 1e-3}}
    forward = {"model_id": run, "forward_input": unplaced["forward_backward_input"]}
    key = {"X-API-Key": ALICE, "X-Idempotency-Key": "the first attempt"}
    answers = [
        await api.post("forward_backward", pass_body(run, 1)),
        await api.post("forward_backward", unplaced),
        await api.http.post("/api/v1/optim_step", json=step, headers=key),
        # repeated after a lost answer
        await api.http.post("/api/v1/optim_step", json=step, headers=key),
        await api.post("forward_backward", pass_body(run, 2)),
        await api.http.post(
            "/api/v1/forward_backward",
            content=binary,
            headers={"X-API-Key": ALICE, "Content-Type": PROTOBUF},
        ),
        await api.post("forward", forward),
        await api.post("optim_step", {"model_id": run, "adam_params": "x"}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 8
    places = [int(answer.json()["request_id"].rpartition(":")[2]) for answer in answers]
    assert places == [1, 2, 3, 3, 4, 5, 6, 7]
    by_place = await kinds(api, run)
    assert [by_place[place].partition("|")[0] for place in range(1, 8)] == [
        "forward_backward", "forward_backward", "optim_step", "forward_backward",
        "forward_backward", "forward", "rejected",
    ]  # fmt: skip
    for wrong in (0, "1", -1, 1.5):
        refused = await api.post("optim_step", {**step, "seq_id": wrong})
        assert refused.status_code == 400
        assert "seq_id" in refused.json()["detail"]


async def test_protobuf_plain_and_compressed_and_json_are_one_request(api: Api) -> None:
    run = await api.new_run()
    body = json.dumps(pass_body(run, 1)).encode()
    binary = read_json_pass(body, forward_only=False).body
    headers = {"content-type": PROTOBUF}
    plain = await api.post("forward_backward", content=binary, headers=headers)
    small = await api.post(
        "forward_backward", content=zstandard.compress(binary), headers=headers | {"content-encoding": "zstd"}
    )
    as_json = await api.post("forward_backward", pass_body(run, 1))
    assert plain.json() == small.json() == as_json.json()


async def test_an_invalid_request_takes_its_seq_and_fails_through_its_future(api: Api) -> None:
    run = await api.new_run()
    answer = await api.post("forward_backward", pass_body(run, 1, [1, 512]))
    assert answer.status_code == 200
    body = await api.services.connection.hget(redis_keys.bodies(POOL.id, run), "1")
    assert json.loads(body) == {
        "error": "Token id 512 at datum 0, position 1 is outside the vocabulary (0..511).",
        "category": "user",
    }


async def test_a_body_that_violates_the_schema_still_takes_its_seq(api: Api) -> None:
    run = await api.new_run()
    for path, seq in (("forward_backward", 1), ("forward", 2), ("optim_step", 3)):
        answer = await api.post(path, {"model_id": run, "seq_id": seq, "adam_params": "x"})
        assert answer.status_code == 200, path
    assert {0, 1, 2, 3} == set(await kinds(api, run))


async def test_a_save_takes_its_seq_valid_or_not(api: Api) -> None:
    run = await api.new_run()
    good = {"model_id": run, "seq_id": 1, "path": "step-1", "kind": "snapshot"}
    answer = await api.post("save_weights_for_sampler", good)
    assert answer.json() == {"request_id": f"{run}:1", "model_id": run}
    bad = {"model_id": run, "seq_id": 2, "path": "../step"}
    assert (await api.post("save_weights_for_sampler", bad)).status_code == 200
    found = await kinds(api, run)
    assert [found[seq].partition("|")[0] for seq in (1, 2)] == ["save", "rejected"]


async def test_a_pending_future_is_answered_408_so_that_sdks_poll_again(api: Api) -> None:
    run = await api.new_run()
    answer = await api.post("retrieve_future", {"request_id": f"{run}:0"})
    assert answer.status_code == 408
    assert answer.json() == {
        "type": "try_again",
        "request_id": f"{run}:0",
        "queue_state": "paused_capacity",
        "queue_state_reason": "no worker serves this base model at the moment",
    }


async def test_a_held_poll_is_answered_as_soon_as_its_result_exists(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, long_poll_s=40) as api:
        run = await api.new_run()
        poll = asyncio.create_task(api.post("retrieve_future", {"request_id": f"{run}:0"}))
        await api.until_held(poll)
        await finish(api, f"{run}:0", Result.of_json({"model_id": run}))
        answer = await poll
        assert answer.json() == {"model_id": run}


async def test_a_failed_op_is_a_200_with_an_error(api: Api) -> None:
    run = await api.new_run()
    await finish(api, f"{run}:0", Result.failed("no", "user"))
    answer = await api.post("retrieve_future", {"request_id": f"{run}:0"})
    assert (answer.status_code, answer.json()) == (200, {"error": "no", "category": "user"})


async def test_a_pass_is_answered_as_protobuf_if_accepted_and_else_as_json(api: Api) -> None:
    run = await api.new_run()
    payload = encode_pass_output([np.array([-1.0, -2.0])], {"loss:sum": 3.0})
    await finish(api, f"{run}:0", Result(ResultKind.PASS, payload))
    poll = {"request_id": f"{run}:0"}
    binary = await api.post("retrieve_future", poll, headers={"accept": f"{PROTOBUF}, application/json"})
    assert binary.headers["content-type"] == PROTOBUF
    assert decode_pass_output(binary.content).metrics == {"loss:sum": 3.0}
    as_json = await api.post("retrieve_future", poll, headers={"accept": "application/json"})
    assert as_json.json()["loss_fn_outputs"][0]["logprobs"]["data"] == [-1.0, -2.0]


async def test_a_client_that_hangs_up_frees_its_waiter(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, long_poll_s=40) as api:
        run = await api.new_run()
        poll, hung_up = api.start_post("retrieve_future", {"request_id": f"{run}:0"})
        await api.until_held(poll)
        hung_up.set()
        async with asyncio.timeout(SOON_S):
            await poll
        assert api.services.futures.waiters == 0


async def test_draining_answers_every_held_poll_and_changes_readyz(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, long_poll_s=40) as api:
        run = await api.new_run()
        poll = asyncio.create_task(api.post("retrieve_future", {"request_id": f"{run}:0"}))
        await api.until_held(poll)
        api.services.drain()
        assert (await poll).status_code == 408
        readiness = await api.http.get("/readyz")
        assert readiness.status_code == 503
        assert "This process is draining." in readiness.json()["reasons"]


async def test_creating_a_run_twice_is_one_run(api: Api) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": POOL.base_model}
    answers = [await api.post("create_model", body) for _ in range(2)]
    assert (
        answers[0].json()
        == answers[1].json()
        == {"request_id": f"{session}:train:0:0", "model_id": f"{session}:train:0"}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_config": {"rank": 0}}, "rank must be between 1 and 128."),
        ({"lora_config": {"rank": 10**9}}, "rank must be between 1 and 128."),
        ({"base_model": "../etc/passwd"}, "Base model '../etc/passwd' is not served here. Available: tiny/model."),
        (
            {"lora_config": {"rank": 1, "train_mlp": False, "train_attn": False, "train_unembed": False}},
            "lora_config: at least one of train_attn, train_mlp, train_unembed is needed.",
        ),
    ],
)
async def test_an_invalid_run_is_rejected_with_a_reason(api: Api, change: dict[str, object], message: str) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": POOL.base_model, **change}
    answer = await api.post("create_model", body)
    assert (answer.status_code, answer.json()["detail"]) == (400, message)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dropout": 0.1}, ["lora_config.dropout", "dropout is not implemented; use 0"]),
        ({"alpha": 0}, ["lora_config.alpha", "greater than 0"]),
        ({"alpha": 700_000}, ["lora_config.alpha", "655360"]),
    ],
)
async def test_an_unsupported_lora_setting_is_rejected_by_name(
    api: Api, change: dict[str, object], words: list[str]
) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": POOL.base_model}
    answer = await api.post("create_model", {**body, "lora_config": {"rank": 2, **change}})
    assert answer.status_code == 422
    assert all(word in answer.json()["detail"] for word in words)


async def test_a_run_reports_its_alpha(api: Api) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {"session_id": session, "base_model": POOL.base_model}
    alphas = []
    for number, config in enumerate(({"rank": 2}, {"rank": 2, "alpha": 7.5, "dropout": 0})):
        made = await api.post("create_model", {**body, "model_seq_id": number, "lora_config": config})
        info = await api.post("get_info", {"model_id": made.json()["model_id"]})
        alphas.append(info.json()["lora_alpha"])
    assert alphas == [32.0, 7.5]


async def test_a_finished_session_closes_its_runs_and_stops_its_heartbeat(api: Api) -> None:
    run = await api.new_run()
    session = run.partition(":")[0]
    assert (await api.post("session_heartbeat", {"session_id": session})).status_code == 200
    reason = {"reason": {"type": "success"}, "detail": None}
    for _ in range(2):
        assert (await api.post(f"sessions/{session}/finish", reason)).status_code == 200
    assert (await api.post("session_heartbeat", {"session_id": session})).status_code == 410
    answer = await api.post("forward_backward", pass_body(run, 1))
    assert (answer.status_code, answer.json()["code"]) == (400, "run_closed")


async def test_unloading_a_run_resolves_and_ends_it(api: Api) -> None:
    run = await api.new_run()
    future = (await api.post("unload_model", {"model_id": run})).json()
    answer = await api.post("retrieve_future", {"request_id": future["request_id"]})
    assert answer.json() == {"model_id": run, "type": "unload_model"}
    assert (await api.post("optim_step", {"model_id": run, "seq_id": 1})).status_code == 400


async def test_a_full_queue_is_answered_429_with_a_time_to_wait(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"ops": 2}) as api:
        run = await api.new_run()
        assert (await api.post("forward_backward", pass_body(run, 1))).status_code == 200
        answer = await api.post("forward_backward", pass_body(run, 2))
        assert answer.status_code == 429
        assert answer.json()["code"] == "queue_full"
        assert answer.headers["retry-after"] == "5"


async def test_a_request_too_large_for_an_empty_queue_fails_without_retry(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"tokens": 2}) as api:
        run = await api.new_run()
        for seq, tokens in ((1, [1, 2, 3]), (2, [1, 2])):
            answer = await api.post("forward_backward", pass_body(run, seq, tokens))
            assert answer.status_code == 200
        queued = await kinds(api, run)
        assert [queued[seq].split("|")[0] for seq in (1, 2)] == ["rejected", "forward_backward"]


async def test_each_sdk_receives_its_settings(api: Api) -> None:
    new = (await api.post("client/config", {"sdk_version": "0.38.0"})).json()
    old = (await api.post("client/config", {"sdk_version": "0.22.0"})).json()
    assert (new["use_pyqwest_transport"], old["use_pyqwest_transport"]) == (True, False)
    assert not new["pjwt_auth_enabled"]
    assert "grpc_target" not in old
    assert old["proto_write_fwdbwd"]


async def test_a_request_of_the_advertised_size_fits_a_body(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, max_body_bytes=1_000_000) as api:
        told = (await api.post("client/config", {"sdk_version": "0.38.0"})).json()
    assert told["cotrain_max_pass_bytes"] == 1_000_000
    assert told["fwdbwd_max_chunk_bytes_count"] == 500_000


async def test_clients_on_other_hosts_are_asked_to_compress(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, address="192.0.2.7") as far:
        assert (await far.post("client/config", {})).json()["proto_compress_fwdbwd"]
    async with running_api(empty_redis.url) as near:
        assert not (await near.post("client/config", {})).json()["proto_compress_fwdbwd"]


async def test_base_models_and_their_context_are_listed(api: Api) -> None:
    answer = await api.http.get("/api/v1/get_server_capabilities", headers={"X-API-Key": "tml-bob_secret-of-bob"})
    assert answer.json() == {
        "supported_models": [
            {
                "model_name": "tiny/model",
                "max_context_length": 64,
                "trainable": True,
                "sampleable": True,
                "tied_embeddings": None,
            }
        ]
    }


async def test_a_rollback_is_reported_with_its_run_and_sdks_can_read_it(api: Api) -> None:
    run = await api.new_run()
    path = f"tinker://{run}/weights/x"
    told = {"weights_epoch": 2, "rolled_back_to": path}
    before = (await api.post("get_info", {"model_id": run})).json()
    assert (before["weights_epoch"], before["rolled_back_to"]) == (0, None)
    await api.services.connection.hset(redis_keys.run(run), mapping=told)  # as `roll_back.lua` does
    info = (await api.post("get_info", {"model_id": run})).json()
    one = (await api.get(f"training_runs/{run}")).json()
    [listed] = (await api.get("training_runs")).json()["training_runs"]
    assert all(told.items() <= answer.items() for answer in (info, one, listed))
    assert tinker.types.GetInfoResponse.model_validate(info).lora_rank == 4
    assert tinker.types.TrainingRun.model_validate(one).lora_rank == 4


async def test_telemetry_of_any_shape_is_accepted(api: Api) -> None:
    answer = await api.post("telemetry", {"events": [{"x": [1]}], "platform": None})
    assert answer.json() == {"status": "accepted"}
