"""Sessions over HTTP and a real Redis: listed, searched, drawn."""

from __future__ import annotations

import json
from typing import Any

from cotrain_store import redis_keys
from tests.support.http_api import ALICE, BOB, POOL, Api
from tests.support.lists import got, save
from tests.support.stand_in import StandIn


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
