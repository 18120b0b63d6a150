"""The history of a run over HTTP: as JSON and as CSV, to the last digit, for its owner alone."""

from __future__ import annotations

import csv
import io
from typing import Any

from tests.support.http_api import ALICE, BOB, Api, pass_body
from tests.support.lists import got
from tests.support.stand_in import NORM, StandIn, loss_of

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
