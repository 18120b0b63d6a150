"""Lists of runs, checkpoints and sessions over HTTP: pages, searches, labels, and the history of a run."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from itertools import product
from typing import Any

import httpx
import pytest

from cotrain_store import redis_keys
from tests.support.http_api import ALICE, BOB, POOL, Api, pass_body
from tests.support.lists import got, save
from tests.support.stand_in import NORM, StandIn, loss_of


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
    await asyncio.sleep(0.01)  # Redis reads its clock once per turn of its loop, in milliseconds
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


async def new_session(api: Api, key: str = ALICE, **fields: Any) -> str:
    return str((await api.post("create_session", fields, key)).json()["session_id"])


async def test_sessions_are_listed_the_newest_first(api: Api) -> None:
    made = [await new_session(api) for _ in range(3)]
    await new_session(api, BOB)
    assert (await got(api, "sessions"))["sessions"] == made[::-1]
    page = await got(api, "sessions?limit=1&offset=1&access_scope=accessible")
    assert page["sessions"] == [made[1]]


async def test_a_session_is_shown_with_its_runs_and_samplers(api: Api) -> None:
    session = await new_session(api, user_metadata={"git": {"dirty": True}}, display_name="nightly")
    body = {"session_id": session, "base_model": POOL.base_model}
    for number in range(11):
        await api.post("create_model", {**body, "model_seq_id": number})
    sampler = (await api.post("create_sampling_session", {**body, "sampling_session_seq_id": 0})).json()
    assert await got(api, f"sessions/{session}") == {
        "training_run_ids": [f"{session}:train:{number}" for number in range(11)],
        "sampler_ids": [sampler["sampling_session_id"]],
        "user_metadata": {"git": '{"dirty": true}'},
        "display_name": "nightly",
    }


def cycle_of(number: int, *runs: str) -> dict[str, Any]:
    """Make a cycle's record as a worker does."""
    rows = [{"run": run, "tenant": "t", "tokens": 3, "ops": {"save": 1}, "failed": 0} for run in runs]
    times = {"planned_at": 1.0, "started_at": 2.0, "duration_ms": 3.0}
    waves = {"wave_ms": 1.0, "optim_ms": 1.0, "sampling_ms": 0.0}
    return {"cycle": number, "outcome": "ok", "runs": rows, **times, **waves}


async def test_a_session_without_a_kept_cycle_has_no_trace_and_says_why(api: Api) -> None:
    session = await new_session(api)
    answer = await got(api, f"sessions/{session}/trace_export")
    assert answer["status"] == "failed"
    assert "1,000 cycles" in answer["error"]


async def test_a_trace_shows_the_cycles_of_its_own_session_alone(api: Api) -> None:
    own, foreign = await api.new_run(), await api.new_run(BOB)
    for record in (cycle_of(1, own, foreign), cycle_of(2, foreign), cycle_of(3, own)):
        await api.services.connection.lpush(redis_keys.cycles(POOL.id), json.dumps(record))
    answer = await got(api, f"sessions/{own.partition(':')[0]}/trace_export")
    assert answer["status"] == "ready"
    trace = await api.http.get(answer["url"])  # with no key
    shown = [event["name"] for event in trace.json()["traceEvents"] if event["ph"] == "X"]
    assert [name for name in shown if name != "planned"] == ["cycle 1", "cycle 3"]
    assert foreign not in trace.text


async def test_a_link_to_a_checkpoint_is_none_to_a_trace_and_the_other_way_round(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    await save(api, worker, run, "a", call="save_weights_external")
    await api.services.connection.lpush(redis_keys.cycles(POOL.id), json.dumps(cycle_of(1, run)))
    trace = (await got(api, f"sessions/{run.partition(':')[0]}/trace_export"))["url"]
    path = f"training_runs/{run}/checkpoints/external_weights/a/external_weights_urls"
    file = (await got(api, path))["urls"]["adapter_config.json"]
    crossed = await api.http.get(f"/api/v1/traces/{file.split('/')[-2]}")
    assert crossed.status_code == 403
    crossed = await api.http.get(f"/api/v1/files/{trace.rpartition('/')[2]}/trace.json")
    assert crossed.status_code == 400


async def search(api: Api, key: str = ALICE, **wanted: Any) -> Any:
    answer = await api.post("sessions/search", wanted, key)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def found(api: Api, **wanted: Any) -> list[str]:
    return [session["session_id"] for session in (await search(api, **wanted))["sessions"]]


async def test_a_search_walks_through_all_sessions_while_others_are_opened(api: Api) -> None:
    made = [await new_session(api) for _ in range(5)]
    walked: list[str] = []
    cursor = None
    for _ in range(3):
        page = await search(api, limit=2, **({"cursor": cursor} if cursor else {}))
        walked += [session["session_id"] for session in page["sessions"]]
        cursor = page["next_cursor"]
        await new_session(api)
    assert (walked, cursor) == (made[::-1], None)


async def test_a_search_finds_by_status_project_and_name(api: Api, worker: StandIn) -> None:
    active = await new_session(api, display_name="Nightly SFT", project_id="p1")
    done = await new_session(api, display_name="nightly RL")
    model = {"session_id": done, "model_seq_id": 0, "base_model": POOL.base_model}
    await api.post("create_model", model)  # that its session's end closes
    await api.post(f"sessions/{done}/finish", {"reason": {"type": "errored"}})
    failed = (run := await api.new_run()).partition(":")[0]
    tenant = (await api.services.tenants.authenticate(ALICE)).id
    worker.execution.fail_run(run, tenant)
    assert await found(api, statuses=[{"type": "active"}]) == [active]
    assert await found(api, statuses=[{"type": "failed"}]) == [failed]
    finished = {"type": "client_finished", "reasons": ["errored"]}
    assert await found(api, statuses=[finished]) == [done]
    assert await found(api, display_name="NIGHT") == [done, active]
    assert await found(api, project_ids=["p1"]) == [active]
    assert await found(api, session_id=done) == [done]
    assert await found(api, owner={"type": "user", "owner_urns": [tenant]}) == [failed, done, active]
    assert (await search(api, BOB, owner={"type": "accessible"}))["sessions"] == []


async def test_a_search_tells_what_is_stored(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    await save(api, worker, run, "a", "b")
    (session,) = (await search(api))["sessions"]
    sizes = [one["size_bytes"] for one in (await got(api, "checkpoints"))["checkpoints"]]
    assert (session["checkpoints_count"], session["checkpoint_storage_bytes"]) == (2, sum(sizes))


async def label(api: Api, run: str, key: str = ALICE, **changes: Any) -> httpx.Response:
    path = f"/api/v1/training_runs/{run}"
    return await api.http.patch(path, json=changes, headers={"X-API-Key": key})


async def listed(api: Api, query: str, key: str = ALICE) -> list[str]:
    page = await got(api, f"training_runs?{query}", key)
    assert page["cursor"]["total_count"] == len(page["training_runs"])
    return [run["training_run_id"] for run in page["training_runs"]]


async def searched(api: Api, **wanted: Any) -> list[str]:
    answer = await api.post("sessions/search", wanted)
    assert answer.status_code == 200, answer.text
    return [session["session_id"] for session in answer.json()["sessions"]]


async def test_runs_are_found_by_their_tags_and_the_words_of_their_notes(api: Api) -> None:
    first, second, third = [await api.new_run() for _ in range(3)]
    await label(api, first, tags=["base", "paper", "base"], note="Longer <b>Warm-up</b>")
    await label(api, second, tags=["base"])
    shown = await got(api, f"training_runs/{first}")
    assert (shown["note"], shown["tags"]) == ("Longer <b>Warm-up</b>", ["base", "paper"])
    assert await listed(api, "tag=base") == [second, first]
    assert await listed(api, "tag=base&tag=paper") == [first]
    assert await listed(api, "text=warm-UP%20paper") == [first]
    assert await listed(api, "text=warm-up&tag=other") == []
    assert await listed(api, "tag=base", BOB) == []
    assert await listed(api, "") == [third, second, first]
    assert await searched(api, tags=["base"], text="longer") == [first.partition(":")[0]]
    assert await searched(api, tags=["none"]) == []

    await label(api, first, note="")
    assert await listed(api, "text=warm-up") == []
    assert (await got(api, f"training_runs/{first}"))["tags"] == ["base", "paper"]
    await label(api, first, tags=[])
    assert await listed(api, "tag=paper") == []


async def test_labels_have_limits_and_belong_to_their_tenant(api: Api) -> None:
    run = await api.new_run()
    assert (await label(api, run, BOB, note="mine")).status_code == 404
    for wrong in ({"note": "x" * 2_001}, {"tags": ["x" * 65]}, {"tags": [""]}, {"tags": ["x"] * 17}):
        assert (await label(api, run, **wrong)).status_code == 422
    assert (await label(api, run, note="\U0001f600" * 2_000)).status_code == 200


async def test_labels_count_as_records(api: Api) -> None:
    run = await api.new_run()
    tenant = (await api.services.tenants.authenticate(ALICE)).id
    name = redis_keys.record_bytes(tenant)
    before = int(await api.services.connection.get(name) or 0)
    await label(api, run, note="x" * 100)
    assert int(await api.services.connection.get(name) or 0) == before + 100
    record = await api.services.records.run(tenant, run)
    await label(api, run, note="")
    assert int(await api.services.connection.get(name) or 0) == before
    with pytest.raises(Exception, match="record_bytes"):
        await api.services.run_labels.set(record, before, note="x")


RATE = 1e-4 / 3


async def trained(api: Api, worker: StandIn, steps: int = 3) -> str:
    run = await api.new_run()
    for seq in range(1, 2 * steps, 2):
        await api.post("forward_backward", pass_body(run, seq))
        adam = {"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": RATE}}
        await api.post("optim_step", adam)
    await worker.run_log()
    return run


async def answer_of(api: Api, path: str, **headers: str) -> Any:
    return await api.http.get(f"/api/v1/{path}", headers={"X-API-Key": ALICE, **headers})


async def test_a_history_has_a_point_for_each_step_to_the_last_digit(api: Api, worker: StandIn) -> None:
    run = await trained(api, worker)
    history = await got(api, f"training_runs/{run}/history")
    assert history["training_run_id"] == run
    points = history["points"]
    assert [(p["kind"], p["step"], p["steps"], p["seq"]) for p in points] == [
        ("optim_step", 1, 1, 2), ("optim_step", 2, 1, 4), ("optim_step", 3, 1, 6),
    ]  # fmt: skip
    assert [p["loss_sum"] for p in points] == [loss_of(seq) for seq in (1, 3, 5)]
    assert {(p["grad_norm"], p["learning_rate"], p["weight_sum"]) for p in points} == {(NORM, RATE, 3.0)}
    later = await got(api, f"training_runs/{run}/history?after_step=2")
    assert later["points"] == points[2:]


async def test_a_table_has_the_same_numbers(api: Api, worker: StandIn) -> None:
    run = await trained(api, worker)
    points = (await got(api, f"training_runs/{run}/history"))["points"]
    asked = await answer_of(api, f"training_runs/{run}/history?format=csv")
    by_header = await answer_of(api, f"training_runs/{run}/history", Accept="text/csv")
    assert asked.text == by_header.text
    assert asked.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(asked.text)))
    assert [list(row) for row in rows] == [list(point) for point in points]
    assert [float(row["loss_sum"]) for row in rows] == [point["loss_sum"] for point in points]


async def test_a_run_without_steps_has_no_points_and_another_tenants_is_not_there(api: Api, worker: StandIn) -> None:
    run = await api.new_run()
    assert (await got(api, f"training_runs/{run}/history"))["points"] == []
    foreign = await api.get(f"training_runs/{run}/history", BOB)
    unknown = await api.get("training_runs/nothing:train:0/history", BOB)
    assert foreign.status_code == unknown.status_code == 404
    assert (await api.get(f"training_runs/{run}/history?after_step=-2")).status_code == 422
    assert (await api.get(f"training_runs/{run}/history?format=xml")).status_code == 422
