"""Notes and tags of runs over HTTP: written, shown to their owner alone, and found by."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cotrain_store import redis_keys
from tests.support.http_api import ALICE, BOB, POOL, Api
from tests.support.lists import got


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


async def test_a_run_is_made_with_a_note_and_tags(api: Api) -> None:
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": POOL.base_model, "note": "first", "tags": ["x"]}
    for _ in range(2):
        run = (await api.post("create_model", body)).json()["model_id"]
        assert await listed(api, "tag=x&text=first") == [run]


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
