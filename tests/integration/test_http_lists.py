"""Lists of runs, checkpoints and sessions over HTTP and a real Redis."""

from __future__ import annotations

from itertools import product
from typing import Any

import httpx
import pytest

from tests.support.http_api import ALICE, BOB, POOL, Api
from tests.support.lists import got, save
from tests.support.stand_in import StandIn


async def runs(api: Api, query: str = "", key: str = ALICE) -> list[str]:
    return [run["training_run_id"] for run in (await got(api, f"training_runs?{query}", key))["training_runs"]]


async def change(api: Api, method: str, path: str, **kwargs: Any) -> httpx.Response:
    headers = {"X-API-Key": ALICE}
    answer = await api.http.request(method, f"/api/v1/{path}", headers=headers, **kwargs)
    assert answer.is_success, answer.text
    return answer


async def publish(api: Api, run: str, name: str, method: str = "POST") -> None:
    await change(api, method, f"training_runs/{run}/checkpoints/weights/{name}/publish")


# ---- Runs ----------------------------------------------------------------------------------------


async def test_pages_of_runs_hold_each_once_the_newest_first(api: Api) -> None:
    made = [await api.new_run() for _ in range(5)]
    await api.new_run(BOB)
    pages = [await got(api, f"training_runs?limit=2&offset={offset}") for offset in (0, 2, 4)]
    listed = [run["training_run_id"] for page in pages for run in page["training_runs"]]
    assert listed == made[::-1]
    assert [page["cursor"] for page in pages] == [
        {"offset": offset, "limit": 2, "total_count": 5} for offset in (0, 2, 4)
    ]


async def test_a_run_made_while_somebody_pages_hides_none(api: Api) -> None:
    made = [await api.new_run() for _ in range(4)]
    first = await runs(api, "limit=2")
    await api.new_run()
    assert set(first) | set(await runs(api, "limit=3&offset=2")) == set(made)


async def test_a_run_is_shown_with_what_its_client_said_and_saved(api: Api, worker: StandIn) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": POOL.base_model,
        "lora_config": {"rank": 8},
        "user_metadata": {"renderer": "llama3", "lr": 0.5},
    }
    run = (await api.post("create_model", body)).json()["model_id"]
    await save(api, worker, run, "a", "b")
    await save(api, worker, run, "c", call="save_weights_for_sampler")
    await save(api, worker, run, "d", call="save_weights_external")
    shown = await got(api, f"training_runs/{run}")
    listed = (await got(api, "training_runs"))["training_runs"][0]
    assert shown == {**listed, "rewind_from": 0}
    assert (shown["base_model"], shown["lora_rank"]) == (POOL.base_model, 8)
    assert (shown["is_lora"], shown["corrupted"]) == (True, False)
    assert shown["user_metadata"] == {"renderer": "llama3", "lr": "0.5"}
    assert shown["last_checkpoint"]["tinker_path"] == f"tinker://{run}/weights/b"
    assert shown["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/c"
    assert shown["last_request_time"] > shown["last_checkpoint"]["time"]


async def test_a_stopped_run_is_shown_as_corrupted(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    record = await api.services.records.run((await api.services.tenants.authenticate(ALICE)).id, run)
    worker.execution.fail_run(run, record.tenant)
    assert (await got(api, f"training_runs/{run}"))["corrupted"] is True


async def test_runs_are_listed_by_the_project_of_their_session(api: Api) -> None:
    await api.new_run()
    moved = await api.new_run()
    session = moved.partition(":")[0]
    assert await runs(api, "project_id=nightly") == []
    await change(api, "PUT", f"sessions/{session}/project", json={"project_id": "nightly"})
    assert await runs(api, "project_id=nightly&access_scope=accessible") == [moved]
    entries = (await got(api, "audit?event_type=projects"))["entries"]
    assert [(entry["event"], entry["event_details"]["project_id"]) for entry in entries] == [
        ("project_assign", "nightly")
    ]


async def test_a_run_is_accessible_to_others_while_something_of_it_is_published(api: Api, worker: StandIn) -> None:
    own, foreign = await api.new_run(BOB), await api.new_run()
    await save(api, worker, foreign, "secret", "shared")
    assert (await api.get(f"training_runs/{foreign}?access_scope=accessible", BOB)).status_code == 404
    await publish(api, foreign, "shared")
    assert await runs(api, "access_scope=accessible", BOB) == [foreign, own]
    assert await runs(api, "access_scope=owned", BOB) == [own]
    shown = await got(api, f"training_runs/{foreign}?access_scope=accessible", BOB)
    assert shown["last_checkpoint"]["checkpoint_id"] == "weights/shared"
    assert (await api.get(f"training_runs/{foreign}", BOB)).status_code == 404
    listed = (await got(api, f"training_runs/{foreign}/checkpoints", BOB))["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/shared"]
    await publish(api, foreign, "shared", "DELETE")
    assert await runs(api, "access_scope=accessible", BOB) == [own]
    assert (await api.get(f"training_runs/{foreign}/checkpoints", BOB)).status_code == 404


async def test_own_runs_are_accessible_once_published_or_not(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    await save(api, worker, run, "shared", "secret")
    await publish(api, run, "shared")
    page = await got(api, "training_runs?access_scope=accessible")
    assert page["cursor"]["total_count"] == len(page["training_runs"]) == 1
    assert page["training_runs"][0]["last_checkpoint"]["checkpoint_id"] == "weights/secret"


async def test_a_page_that_cannot_be_is_refused_by_the_name_of_the_field(api: Api) -> None:
    lists = ("training_runs", "checkpoints", "sessions")
    wrong = ("limit=0", "limit=1001", "limit=x", "offset=-1", "offset=2147483648")
    for path, query in product(lists, wrong):
        answer = await api.get(f"{path}?{query}")
        assert answer.status_code == 422
        assert query.partition("=")[0] in answer.json()["detail"]


# ---- Checkpoints ---------------------------------------------------------------------------------


async def names(api: Api, path: str, **headers: str) -> tuple[list[str], int | None]:
    """List checkpoints: their names, and how many there are said to be."""
    answer = await api.http.get(f"/api/v1/{path}", headers={"X-API-Key": ALICE, **headers})
    page = answer.json()
    cursor = page["cursor"]
    listed = [checkpoint["checkpoint_id"] for checkpoint in page["checkpoints"]]
    return listed, cursor and cursor["total_count"]


async def test_pages_of_checkpoints_hold_each_once_the_newest_first(api: Api, worker: StandIn) -> None:
    first, second = await api.new_run(), await api.new_run()
    await save(api, worker, first, "a", "b")
    await save(api, worker, second, "c")
    assert await names(api, "checkpoints?limit=2") == (["weights/c", "weights/b"], 3)
    assert await names(api, "checkpoints?limit=2&offset=2") == (["weights/a"], 3)
    assert await names(api, f"training_runs/{first}/checkpoints") == (["weights/b", "weights/a"], None)


async def test_checkpoints_are_found_by_exact_metadata_type_and_base_model(api: Api, worker: StandIn) -> None:
    run, foreign = await api.new_run(), await api.new_run(BOB)
    kinds = ("save_weights", "save_weights", "save_weights_for_sampler", "save_weights")
    for seq, (name, kind) in enumerate(zip("abcd", kinds, strict=True), 1):
        notes = {"step": str(seq % 2), "of": "sweep"}
        body = {"model_id": run, "seq_id": seq, "path": name, "user_metadata": notes}
        assert (await api.post(kind, body)).status_code == 200
    theirs = {"model_id": foreign, "seq_id": 1, "path": "x", "user_metadata": {"of": "sweep"}}
    assert (await api.post("save_weights", theirs, BOB)).status_code == 200
    await worker.run_log()

    async def found(**wanted: Any) -> tuple[list[str], Any]:
        answer = await api.post("checkpoints/search", wanted)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert {each["base_model"] for each in page["checkpoints"]} <= {POOL.base_model}
        return [each["checkpoint_id"] for each in page["checkpoints"]], page["next_cursor"]

    every = ["weights/d", "sampler_weights/c", "weights/b", "weights/a"]
    assert await found() == (every, None)
    first, cursor = await found(limit=3)
    assert first + (await found(limit=3, cursor=cursor))[0] == every
    assert (await found(limit=4))[1] is None
    for wanted, expected in (
        ({"user_metadata": {"step": "1", "of": "sweep"}}, ["sampler_weights/c", "weights/a"]),
        ({"user_metadata": {"of": "swee"}}, []),
        ({"checkpoint_type": "sampler"}, ["sampler_weights/c"]),
        ({"base_models": [POOL.base_model, "other"]}, every),
        ({"base_models": []}, []),
        ({"project_ids": ["none"]}, []),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
    ):
        assert (await found(**wanted))[0] == expected
    page = await got(api, f"training_runs/{run}/checkpoints")
    assert {each["base_model"] for each in page["checkpoints"]} == {POOL.base_model}


async def test_a_save_is_in_no_list_until_its_files_are_durable(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    await api.post("save_weights", {"model_id": run, "seq_id": 1, "path": "a"})
    refs = await worker.run_log(stores=False)
    assert await names(api, "checkpoints") == ([], 0)
    assert await names(api, f"training_runs/{run}/checkpoints") == ([], None)
    worker.store(refs)
    assert await names(api, "checkpoints") == (["weights/a"], 1)


async def test_what_is_deleted_or_expired_is_in_no_list_and_not_counted(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    await save(api, worker, run, "a", "b", "c")
    await change(api, "DELETE", f"training_runs/{run}/checkpoints/weights/a")
    tenant = (await api.services.tenants.authenticate(ALICE)).id
    await api.services.checkpoints.set_ttl(tenant, run, "weights", "b", 0)
    assert await names(api, "checkpoints") == (["weights/c"], 1)
    assert await names(api, f"training_runs/{run}/checkpoints") == (["weights/c"], None)


@pytest.mark.parametrize(("version", "sees"), [("0.22.3", 2), ("0.25.0", 2), ("0.30.0", 3), ("0.38.0", 3)])
async def test_sdks_that_know_no_external_checkpoints_see_none(
    api: Api, worker: StandIn, version: str, sees: int
) -> None:
    run = await api.new_run()
    await save(api, worker, run, "a")
    await save(api, worker, run, "b", call="save_weights_external")
    await save(api, worker, run, "c", call="save_weights_for_sampler")
    agent = {"User-Agent": f"AsyncTinker/Python {version}"}
    listed, total = await names(api, "checkpoints", **agent)
    assert (len(listed), total) == (sees, sees)
    assert len((await names(api, f"training_runs/{run}/checkpoints", **agent))[0]) == sees
