"""Loads over HTTP and a real Redis: into a run, as a new run, of one's own and of others."""

from __future__ import annotations

from typing import Any

import pytest

from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.runs import WeightsRecord
from tests.support.checkpoint_requests import LOCKED, change, info, load, result, save, start, tenant_of
from tests.support.http_api import ALICE, BOB, POOL, Api
from tests.support.stand_in import StandIn


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
async def test_a_load_into_a_run_answers_with_its_path(api: Api, worker: StandIn, kind: str) -> None:
    run, other = await api.new_run(), await api.new_run()
    path = (await save(api, worker, run, 1, kind))["path"]
    answer = await result(api, worker, await load(api, other, 1, path))
    assert answer == {"path": path, "model_id": other, "type": "load_weights"}


async def test_a_load_sent_again_is_the_same_request_whatever_became_of_its_path(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    first = await load(api, run, 2, path)
    await save(api, worker, run, 3, overwrite=True)
    assert (await load(api, run, 2, path)).json() == first.json()
    await change(api, "DELETE", path)
    assert (await load(api, run, 2, path)).json() == first.json()
    assert "path" in await result(api, worker, first)
    assert (await load(api, run, 2, path + "b")).json()["code"] == "seq_conflict"


async def test_a_load_that_cannot_be_fails_in_its_place(api: Api, worker: StandIn) -> None:
    run, small = await api.new_run(), await api.new_run(rank=2)
    path = (await save(api, worker, run, 1))["path"]
    bare = (await save(api, worker, run, 2, "sampler_weights"))["path"]
    export = (await save(api, worker, run, 3, "external_weights", **LOCKED))["path"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"path": path[:-1] + "b"}, "Checkpoint not found."),
        ({"path": "tinker://a/b"}, "The checkpoint path is malformed. Use tinker://<run>/weights/<name>."),
        ({"path": None}, "path: Input should be a valid string."),
        ({"path": path}, "The checkpoint has rank 4, train_attn=True"),
        ({"path": export}, "Encrypted external_weights are for download only"),
        ({"path": path, "weights_access_token": "tml-no"}, "weights_access_token is not a valid"),
        ({"path": path, "weights_access_token": "eyJ.a.b"}, "weights_access_token is not a valid"),
    ]
    for seq, (fields, message) in enumerate(cases, 1):
        answer = await result(api, worker, await load(api, small, seq, **fields))
        assert answer["category"] == "user"
        assert answer["error"].startswith(message)
    answer = await result(api, worker, await load(api, run, 4, bare, optimizer=True))
    assert answer["error"] == "This checkpoint has no optimizer state; load it without."
    assert "path" in await result(api, worker, await load(api, run, 5, bare))


async def test_an_encrypted_export_is_not_sampled_from(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1, "external_weights"))["path"]
    sampler = {"session_id": run.partition(":")[0], "sampling_session_seq_id": 0}
    assert "sampling_session_id" in (await api.post("create_sampling_session", {**sampler, "model_path": path})).json()
    path = (await save(api, worker, run, 2, "external_weights", **LOCKED))["path"]
    sampler["sampling_session_seq_id"] = 1
    refused = await api.post("create_sampling_session", {**sampler, "model_path": path})
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith("Encrypted external_weights are for download only")
    asked = {"model": path, "prompt": "a", "max_tokens": 1}
    headers = {"X-API-Key": ALICE}
    refused = await api.http.post("/oai/api/v1/completions", json=asked, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("Encrypted external_weights are for download only")


async def test_a_run_started_by_a_load_is_what_the_checkpoint_was(api: Api, worker: StandIn) -> None:
    run = await api.new_run(train_unembed=False)
    path = (await save(api, worker, run, 1))["path"]
    answer = await start(api, path, user_metadata={"renderer": "qwen3"})
    model = answer.json()["model_id"]
    assert model.endswith(":train:1")
    done = await result(api, worker, answer)
    assert done == {"path": path, "model_id": model, "type": "load_weights"}
    told = (await api.post("get_info", {"model_id": model})).json()
    assert (told["lora_rank"], told["model_name"]) == (4, POOL.base_model)
    assert told["optimizer_config"] == {"type": "adamw"}
    record = await api.services.records.run((await tenant_of(api)).id, model)
    assert record.user_metadata == {"renderer": "qwen3"}
    assert "path" in await save(api, worker, model, 1)


async def test_a_run_started_twice_is_one_whatever_became_of_its_path(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    first = await start(api, path)
    session = first.json()["model_id"].partition(":")[0]
    await save(api, worker, run, 2, overwrite=True)
    assert (await start(api, path, session_id=session)).json() == first.json()
    await change(api, "DELETE", path)
    assert (await start(api, path, session_id=session)).json() == first.json()
    assert "path" in await result(api, worker, first)
    other = await save(api, worker, run, 3)
    taken = await start(api, other["path"], session_id=session, user_metadata={"x": "y"})
    assert taken.json()["code"] == "seq_conflict"


async def test_a_run_that_cannot_be_started_so_is_refused_now(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    bare = (await save(api, worker, run, 2, "sampler_weights"))["path"]
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"path": path + "b"}, 404, "Checkpoint not found."),
        ({"path": "nothing"}, 400, "The checkpoint path is malformed. Use tinker://<run>/weights/<name>."),
        ({"path": bare}, 400, "This checkpoint has no optimizer state; load it without."),
        ({"path": path, "base_model": "other"}, 400, "The checkpoint is of base model tiny/model."),
        (
            {"path": path, "optimizer_config": {"type": "dimuon", "version": 1}},
            400,
            "optimizer_config.type: 'dimuon' is not served. Known: adamw, muon.",
        ),
        ({"path": path, "user_metadata": {"a": "x" * 70_000}}, 400, "user_metadata may have"),
        ({"path": path, "number": -1}, 400, "model_seq_id: "),
        ({"path": path, "session_id": "0" * 32}, 404, "Session not found."),
    ]
    for fields, status, message in cases:
        answer = await start(api, **fields)
        assert (answer.status_code, answer.json()["detail"][: len(message)]) == (status, message)
    body = {"path": path, "optimizer": True}
    assert (await api.post("load_weights", body)).status_code == 400
    assert (await start(api, path, base_model=POOL.base_model)).status_code == 200


async def test_a_load_holds_on_to_weights_that_are_deleted_meanwhile(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    queued = await load(api, run, 2, path)
    await change(api, "DELETE", path)
    assert worker.saved.unused_weights() == []
    assert (await result(api, worker, queued))["path"] == path


async def test_weights_that_go_between_the_look_and_the_load_fail_it_alone(
    api: Api, worker: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await api.new_run()
    path = (await save(api, worker, run, 1))["path"]
    look = api.services.records.weights

    async def look_and_lose(ref: WeightsRef) -> WeightsRecord:
        found = await look(ref)
        await change(api, "DELETE", path)
        assert worker.saved.forget_weights(ref)
        return found

    monkeypatch.setattr(api.services.records, "weights", look_and_lose)
    failed = await result(api, worker, await load(api, run, 2, path))
    assert failed["category"] == "user"
    assert "were deleted" in failed["error"]
    assert (await start(api, path)).status_code == 404
    assert "path" in await save(api, worker, run, 3)


# ---- Share ---------------------------------------------------------------------------------------


async def test_nobody_else_can_use_a_checkpoint_until_it_is_published(api: Api, worker: StandIn) -> None:
    run, bobs = await api.new_run(), await api.new_run(BOB)
    path = (await save(api, worker, run, 1))["path"]

    async def bob_can() -> list[bool]:
        seq = next(places)
        loaded = await result(api, worker, await load(api, bobs, seq, path, key=BOB), BOB)
        session = bobs.partition(":")[0]
        sampler = {"session_id": session, "sampling_session_seq_id": seq, "model_path": path}
        return [
            "path" in loaded,
            (await info(api, path, BOB)).status_code == 200,
            (await start(api, path, key=BOB)).status_code == 200,
            (await api.post("create_sampling_session", sampler, BOB)).status_code == 200,
            (await change(api, "GET", path, "/archive", key=BOB)).status_code == 302,
        ]

    places = iter(range(1, 9))
    assert await bob_can() == [False] * 5
    assert (await change(api, "POST", path, "/publish")).status_code == 204
    assert await bob_can() == [True] * 5
    for method, then, body in [
        ("DELETE", "", None),
        ("POST", "/publish", None),
        ("DELETE", "/publish", None),
        ("PUT", "/ttl", {"ttl_seconds": 3_600}),
    ]:
        answer = await change(api, method, path, then, key=BOB, json=body)
        assert (answer.status_code, answer.json()["detail"]) == (404, "Checkpoint not found.")
    assert (await change(api, "DELETE", path, "/publish")).status_code == 204
    assert await bob_can() == [False] * 5


async def test_a_key_of_its_owner_opens_a_checkpoint_to_another_tenant(api: Api, worker: StandIn) -> None:
    run, bobs = await api.new_run(), await api.new_run(BOB)
    path = (await save(api, worker, run, 1))["path"]
    token: dict[str, Any] = {"key": BOB, "weights_access_token": ALICE}
    loaded = await result(api, worker, await load(api, bobs, 1, path, **token), BOB)
    assert loaded["path"] == path
    assert (await start(api, path, **token)).status_code == 200
    assert (await start(api, path, key=BOB, weights_access_token=BOB)).status_code == 404
    assert (await start(api, path, key=BOB, weights_access_token="tml-x")).status_code == 400


async def test_many_wrong_keys_for_anothers_weights_are_slowed(api: Api, worker: StandIn) -> None:
    path = (await save(api, worker, await api.new_run(), 1))["path"]
    answers = [await start(api, path, key=BOB, weights_access_token=f"tml-{n}") for n in range(11)]
    assert [answer.status_code for answer in answers] == [400] * 10 + [429]
