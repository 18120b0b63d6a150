"""Sampling over HTTP and a real Redis: samplers, accepted and rejected requests, results."""

from __future__ import annotations

from typing import Any

import pytest

from cotrain.wire.codec import PROTOBUF, decode_sample_response
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId
from tests.support.http_api import ALICE, BOB, POOL, Api, running_api, sample_body
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import StandIn, stand_in


async def new_session(api: Api, key: str = ALICE) -> str:
    session: str = (await api.post("create_session", {}, key)).json()["session_id"]
    return session


async def save(api: Api, worker: StandIn, run: str, seq: int, **fields: Any) -> dict[str, Any]:
    """Save and run the queued ops. Return the answer of the save."""
    body = {"model_id": run, "seq_id": seq, "kind": "snapshot", **fields}
    future = (await api.post("save_weights_for_sampler", body)).json()
    await worker.run_log()
    answer: dict[str, Any] = (await api.post("retrieve_future", future)).json()
    return answer


async def session_on(api: Api, path: str, number: int, run: str, key: str = ALICE) -> Any:
    body = {"session_id": run.partition(":")[0], "sampling_session_seq_id": number, "model_path": path}
    return await api.post("create_sampling_session", body, key)


async def test_a_sampler_of_a_base_model_needs_no_training(api: Api) -> None:
    session = await new_session(api)
    body = {"session_id": session, "sampling_session_seq_id": 3, "base_model": POOL.base_model}
    answer = await api.post("create_sampling_session", body)
    assert answer.json() == {"sampling_session_id": f"{session}:sample:3", "type": "create_sampling_session"}
    info = await api.get(f"samplers/{session}:sample:3")
    assert info.json() == {"sampler_id": f"{session}:sample:3", "base_model": "tiny/model", "model_path": None}


async def test_a_repeated_sampler_is_the_same_and_a_new_one_needs_a_new_number(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1, path="a"))["path"]
    answers = [await session_on(api, path, 0, run) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    other = (await save(api, worker, run, 2, path="b"))["path"]
    refused = await session_on(api, other, 0, run)
    assert (refused.status_code, refused.json()["code"]) == (400, "seq_conflict")


async def test_a_repeated_sampler_keeps_its_weights_after_its_name_moved(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1, path="best"))["path"]
    sampler = (await session_on(api, path, 0, run)).json()["sampling_session_id"]
    await save(api, worker, run, 2, path="best")
    assert (await session_on(api, path, 0, run)).json()["sampling_session_id"] == sampler
    await api.post("asample", sample_body(sampler, 0))
    assert [claimed.weights for claimed in worker.claim()] == [f"{run}:1"]


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ({}, 400, "One of base_model and model_path is needed."),
        ({"base_model": "other"}, 400, "Base model 'other' is not served here. Available: tiny/model."),
        (
            {"model_path": "tinker://r/external_weights/a"},
            400,
            "The checkpoint path is malformed. Use tinker://<run>/weights/<name>.",
        ),
        ({"model_path": "tinker://s:train:0/weights/a"}, 404, "Checkpoint not found."),
    ],
)
async def test_a_sampler_of_missing_weights_is_rejected_with_a_reason(
    api: Api, source: dict[str, str], code: int, message: str
) -> None:
    body = {"session_id": await new_session(api), "sampling_session_seq_id": 0, **source}
    answer = await api.post("create_sampling_session", body)
    assert (answer.status_code, answer.json()["detail"]) == (code, message)


async def test_named_weights_are_sampled_by_their_path(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    saved = await save(api, worker, run, 1, path="step-1")
    assert saved == {"path": f"tinker://{run}/sampler_weights/step-1", "type": "save_weights_for_sampler"}
    sampler = (await session_on(api, saved["path"], 0, run)).json()["sampling_session_id"]
    info = (await api.get(f"samplers/{sampler}")).json()
    assert (info["base_model"], info["model_path"]) == ("tiny/model", saved["path"])
    await api.post("asample", sample_body(sampler, 0))
    assert [claimed.weights for claimed in worker.claim()] == [f"{run}:1"]


async def test_an_unnamed_save_is_a_sampler_at_once(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    saved = await save(api, worker, run, 1, sampling_session_seq_id=5)
    sampler = f"{run.partition(':')[0]}:sample:5"
    assert saved == {"path": None, "sampling_session_id": sampler, "type": "save_weights_for_sampler"}
    assert (await api.get(f"samplers/{sampler}")).json()["base_model"] == "tiny/model"
    await api.post("asample", sample_body(sampler, 0))
    assert [claimed.weights for claimed in worker.claim()] == [f"{run}:1"]


async def test_a_save_after_a_lost_answer_is_repeated_under_another_number(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    body = {"model_id": run, "seq_id": 1, "kind": "snapshot", "sampling_session_seq_id": 5}
    lost = await api.post("save_weights_for_sampler", body)
    again = await api.post("save_weights_for_sampler", body | {"sampling_session_seq_id": 6})
    assert lost.json() == again.json()
    await worker.run_log()
    saved = (await api.post("retrieve_future", again.json())).json()
    assert saved["sampling_session_id"] == f"{run.partition(':')[0]}:sample:5"


async def test_a_sample_is_accepted_at_once_with_an_id_per_sequence(api: Api) -> None:
    sampler = await api.new_sampler()
    answer = await api.post("asample", sample_body(sampler, 7, num_samples=2))
    assert answer.json() == {"request_id": f"{sampler}:7", "sample_sequence_ids": [f"{sampler}:7:0", f"{sampler}:7:1"]}


async def test_a_repeated_sample_is_the_same_and_runs_once(api: Api, worker: StandIn) -> None:
    sampler = await api.new_sampler()
    answers = [await api.post("asample", sample_body(sampler, 0)) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len(worker.claim()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"chunks": []}}, "prompt has 0 tokens; tiny/model samples from"),
        (
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 400_000}]}},
            "prompt has 400000 tokens; tiny/model samples from",
        ),
        ({"sampling_params": {"top_k": 513}}, "top_k must be between 1 and 512"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k is not supported here."),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature: "),
    ],
)
async def test_an_invalid_sample_is_rejected_at_once_and_its_number_stays_free(
    api: Api, changes: dict[str, Any], message: str
) -> None:
    sampler = await api.new_sampler()
    answer = await api.post("asample", sample_body(sampler, 0, **changes))
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(message)
    assert (await api.post("asample", sample_body(sampler, 0))).status_code == 200


async def test_only_a_tenant_over_its_quota_is_throttled(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"samples": 2}) as api:
        alices, bobs = await api.new_sampler(), await api.new_sampler(BOB)
        with stand_in(api.services) as worker:
            for seq in range(2):
                assert (await api.post("asample", sample_body(alices, seq))).status_code == 200
            slowed = await api.post("asample", sample_body(alices, 2))
            assert (slowed.status_code, slowed.json()["code"]) == (429, "sampling_busy")
            assert slowed.headers["retry-after"] == "1"
            assert (await api.post("asample", sample_body(bobs, 0), BOB)).status_code == 200
            worker.claim()
            worker.finish(RequestId(f"{alices}:0"), [1])
            assert (await api.post("asample", sample_body(alices, 2))).status_code == 200


async def test_a_result_is_pending_then_available_and_can_be_read_twice(api: Api, worker: StandIn) -> None:
    sampler = await api.new_sampler()
    future = (await api.post("asample", sample_body(sampler, 0))).json()
    assert (await api.post("retrieve_future", future)).status_code == 408
    worker.claim()
    worker.finish(RequestId(f"{sampler}:0"), [4, 5], [6])
    for _ in range(2):
        answer = await api.post("retrieve_future", future, headers={"accept": PROTOBUF})
        assert answer.headers["content-type"] == PROTOBUF
        response = decode_sample_response(answer.content)
        assert [sequence.tokens for sequence in response.sequences] == [[4, 5], [6]]


async def test_older_clients_get_a_sample_as_json(api: Api, worker: StandIn) -> None:
    sampler = await api.new_sampler()
    future = (await api.post("asample", sample_body(sampler, 0))).json()
    worker.claim()
    worker.finish(RequestId(f"{sampler}:0"), [4, 5], cached_prompt_tokens=2)
    answer = await api.post("retrieve_future", future)
    sequence = {"stop_reason": "length", "tokens": [4, 5], "logprobs": [-4.0, -5.0]}
    assert answer.json() == {
        "type": "sample",
        "sequences": [{**sequence, "policy_spans": [{"start": 0, "end": 2}]}],
        "prompt_cache_hit_tokens": 2,
    }


async def test_an_expired_result_is_answered_410_so_that_sdks_sample_again(api: Api, worker: StandIn) -> None:
    sampler = await api.new_sampler()
    future = (await api.post("asample", sample_body(sampler, 0))).json()
    worker.claim()
    worker.finish(RequestId(f"{sampler}:0"), [1])
    await api.services.connection.delete(redis_keys.result(RequestId(f"{sampler}:0")))
    answer = await api.post("retrieve_future", future)
    assert (answer.status_code, answer.json()["code"]) == (410, "sample_expired")


async def test_the_worker_is_notified_of_a_cancelled_running_sample(api: Api, worker: StandIn) -> None:
    sampler = await api.new_sampler()
    future = (await api.post("asample", sample_body(sampler, 0))).json()
    worker.claim()
    await api.post("cancel_future", future)
    assert worker.sampling.cancelled() == [f"{sampler}:0"]


async def test_cancelling_a_finished_or_unknown_request_has_no_effect(api: Api, worker: StandIn) -> None:
    sampler = await api.new_sampler()
    run = await api.new_run()
    future = (await api.post("asample", sample_body(sampler, 0))).json()
    assert (await api.post("cancel_future", future, BOB)).status_code == 204
    for request in ("x", f"{run}:0", f"{sampler}:1", f"{sampler}:x"):
        assert (await api.post("cancel_future", {"request_id": request})).status_code == 204
    assert (await api.post("retrieve_future", future)).status_code == 408
    assert (await api.post("retrieve_future", {"request_id": f"{run}:0"})).status_code == 408
    worker.claim()
    worker.finish(RequestId(f"{sampler}:0"), [1])
    await api.post("cancel_future", future)
    assert "sequences" in (await api.post("retrieve_future", future)).json()


async def test_a_finished_session_rejects_samples_and_keeps_its_results(api: Api, worker: StandIn) -> None:
    sampler = await api.new_sampler()
    future = (await api.post("asample", sample_body(sampler, 0))).json()
    worker.claim()
    worker.finish(RequestId(f"{sampler}:0"), [1])
    session = sampler.partition(":")[0]
    await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    refused = await api.post("asample", sample_body(sampler, 1))
    assert (refused.status_code, refused.json()["code"]) == (410, "session_finished")
    body = {"session_id": session, "sampling_session_seq_id": 9, "base_model": POOL.base_model}
    assert (await api.post("create_sampling_session", body)).status_code == 410
    assert "sequences" in (await api.post("retrieve_future", future)).json()


async def test_sdks_receive_the_settings_for_sampling(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        config = (await api.post("client/config", {})).json()
        assert config["sample_use_retrieve_futures"] is True
        assert config["sample_max_concurrent_requests"] == 2_000
        live = (await api.post("client/dynamic_config", {})).json()
        assert live["sample_cancel_enabled"] is True
    async with running_api(empty_redis.url, quotas={"samples": 7}) as api:
        config = (await api.post("client/config", {})).json()
        assert config["sample_max_concurrent_requests"] == 7
