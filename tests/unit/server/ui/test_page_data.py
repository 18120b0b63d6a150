"""Contents of the pages, made by pure functions from the stored records, for the operator and for one tenant."""

from typing import Any

import pytest

from cotrain.wire.rest import HistoryPoint, WaitCause
from cotrain_server.ui.charts import (
    SettingsRow,
    activity_of,
    curves_of,
    differing,
    loss_by_rate,
    own_activity_of,
    parallel_coordinates,
    settings_row,
)
from cotrain_server.ui.number_format import age, ago, duration, percent, plural, short, size
from cotrain_server.ui.pages.administration import LIMITS
from cotrain_server.ui.pages.cycles import COLOURS, Viewer, cycle_of, runs_of, timeline_of
from cotrain_server.ui.pages.overview import problems_of
from cotrain_server.ui.pages.playground import level_of
from cotrain_server.ui.router import _number
from cotrain_server.ui.run_tables import BUSIEST_SHOWN, busiest, keeps, run_row, tokens_of_runs
from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId, WorkerId
from cotrain_store.messages.runs import LoraSpec, RunRecord, RunState
from cotrain_store.monitoring.recent_activity import Minute
from cotrain_store.tenants.run_list import RunPosition
from cotrain_store.usage import cycle_counts

NOW = 10_000.0


def run_of(**changes: Any) -> RunRecord:
    given: dict[str, Any] = {
        "id": RunId("s:train:0"), "tenant": TenantId("a"), "session": SessionId("s"),
        "pool": PoolId("p"), "base_model": "m", "lora": LoraSpec(8, 1), "created_at": 1.0,
    }  # fmt: skip
    return RunRecord(**{**given, **changes})


def position_of(**changes: Any) -> RunPosition:
    given: dict[str, Any] = {
        "accepted": 9, "planned": 9, "done": 9, "ready_since_ms": None, "gap_since_ms": None,
        "newest": None, "device_s": 0.0, "worker": "w0",
    }  # fmt: skip
    return RunPosition(**{**given, **changes})


def cycle(number: int, *tenants: str, start: float = 0.0, tokens: int = 10) -> dict[str, Any]:
    return {
        "cycle": number, "worker": "w0", "planned_at": start, "started_at": start + 0.5,
        "duration_ms": 1000.0, "wave_ms": 600.0, "optim_ms": 200.0, "sampling_ms": 100.0,
        "tokens": tokens * len(tenants), "computed_tokens": tokens * len(tenants),
        "padded_tokens": 2 * tokens * len(tenants), "forwards": 1,
        "outcome": "ok",
        "runs": [
            {"run": f"{tenant}-session:train:0", "tenant": tenant, "tokens": tokens,
             "ops": {"forward_backward": 1}, "failed": 0, "digests": {"1": f"digest-of-{tenant}"}}
            for tenant in tenants
        ],
    }  # fmt: skip


def test_a_prompt_that_is_computed_once_makes_no_negative_padding() -> None:
    shared = cycle(1, "a", "b") | {"computed_tokens": 4, "padded_tokens": 5}  # of 20 tokens
    shown = timeline_of([shared], Viewer(None, {}))
    assert [each["padding"] for each in shown["cycles"]] == [0.2]
    assert (shown["cycles"][0]["tokens"], cycle_counts(shared, {}, {})["padding_tokens"]) == (20, 1)


def test_two_tenants_share_a_bar_in_two_colours() -> None:
    shown = timeline_of([cycle(1, "a", "b")], Viewer(None, {"a": "alice", "b": "bob"}))
    (row,) = shown["rows"]
    (bar,) = row["bars"]
    assert [part["colour"] for part in bar["stack"]] == ["s0", "s1"]
    assert [part["height"] for part in bar["stack"]] == [20.0, 20.0]
    assert [each["name"] for each in shown["legend"]] == ["alice", "bob"]


def test_a_tenant_sees_only_the_sum_of_other_tenants() -> None:
    records = [cycle(1, "a", "b", "c")]
    viewer = Viewer("b", {"b": "you"})
    shown = timeline_of(records, viewer)
    text = repr([shown, cycle_of(records[0], viewer), runs_of(records[0], viewer)])
    for foreign in ("'a'", "'c'", "a-session", "c-session", "digest-of-a", "w0"):
        assert foreign not in text
    assert "b-session" in text
    assert shown["rest_tokens"] == 20
    assert [part["colour"] for part in shown["rows"][0]["bars"][0]["stack"]] == ["s0", "rest"]


def test_tenants_beyond_the_number_of_colours_share_one() -> None:
    names = [f"t{number:02}" for number in range(COLOURS + 3)]
    shown = timeline_of([cycle(1, *names)], Viewer(None))
    assert len(shown["legend"]) == COLOURS
    assert shown["rest_tokens"] == 30


def test_a_timeline_without_cycles_is_empty() -> None:
    assert timeline_of([], Viewer(None))["rows"] == []


@pytest.mark.parametrize(
    ("cause", "state", "kind"),
    [("idle", "idle", ""), ("no_worker", "no worker", "bad"), ("running", "running", "ok"), ("gap", "waiting", "info")],
)
def test_a_row_has_a_state_and_the_reason_of_a_wait(cause: WaitCause, state: str, kind: str) -> None:
    row = run_row(run_of(), position_of(accepted=12), (cause, "It waits."), "alice")
    assert (row["state"], row["state_kind"], row["waits"]) == (state, kind, "It waits.")
    assert (row["requests_waiting"], row["tenant_name"]) == (3, "alice")


def test_a_list_is_filtered_by_state_model_and_text() -> None:
    failed = run_of(state=RunState.FAILED, user_metadata={"name": "Math Distill"}, note="Warm-up", tags=("paper",))
    assert keeps("", "", "") is None
    for given, is_kept in [
        (("failed", "", ""), True), (("live", "", ""), False), (("", "other", ""), False),
        (("", "m", "distill"), True), (("", "", "train:0"), True), (("", "", "poems"), False),
        (("", "", "warm"), True), (("", "", "Paper"), True),
    ]:  # fmt: skip
        keep = keeps(*given)
        assert keep is not None
        assert keep(failed) is is_kept


def test_the_shares_of_a_device_add_up_to_one_minute() -> None:
    minutes = [
        Minute(9_900, {"train_s": 50.0, "sample_s": 40.0, "tokens": 600}),
        Minute(9_960, {"train_s": 10.0, "optim_s": 10.0, "tokens": 80}),
    ]
    shown = activity_of(minutes, 1, NOW)
    assert shown["tokens_per_s"] == [10.0, 2.0]  # 40 s of the last minute have passed
    for parts in shown["duty"]:
        assert sum(parts.values()) == pytest.approx(1.0, abs=1e-3)
    assert shown["duty"][1]["idle"] == 0.5


def test_the_chart_of_a_tenant_shows_its_own_part_only() -> None:
    minute = Minute(9_940, {"tokens": 600, "own_tokens": 60, "own_device_s": 6.0})
    assert own_activity_of([minute], NOW) == {
        "starts": [9_940], "tokens_per_s": [1.0], "device": [0.1], "device_s": 6.0, "tokens": 60,
    }  # fmt: skip


def point(step: int, loss: float, time_s: float, learning_rate: float = 1e-4) -> HistoryPoint:
    return HistoryPoint(
        kind="optim_step", step=step, steps=1, seq=2 * step, time_s=time_s, loss_sum=loss, weight_sum=2.0,
        grad_norm=0.5, learning_rate=learning_rate, tokens=10, run_tokens=10 * step, passes=1,
    )  # fmt: skip


def test_a_form_takes_a_size_with_a_unit() -> None:
    given = ("100 GB", "1.5GB", "7", "0.5", "", "soon", "1 XB")
    assert list(map(_number, given)) == [10**11, 15 * 10**8, 7, 0.5, None, "soon", "1 XB"]


def test_runs_of_different_length_share_an_axis() -> None:
    longer = [point(1, 4.0, 0.0), point(2, 2.0, 5.0)]
    charts = curves_of(
        {RunId("s1:train:0"): longer, RunId("s2:train:0"): [point(2, 6.0, 1.0)]}, {RunId("s1:train:0"): "sft"}
    )
    by_name = {chart["name"]: chart for chart in charts}
    assert by_name["loss"]["x"] == [1, 2]
    assert [each["label"] for each in by_name["loss"]["series"]] == ["sft", "s2…:0"]
    assert [each["values"] for each in by_name["loss"]["series"]] == [[2.0, 1.0], [None, 3.0]]
    assert by_name["tokens_per_s"]["series"][0]["values"] == [None, 2.0]
    assert "rollout_gap" not in by_name
    drifted = [point(1, 4.0, 0.0).model_copy(update={"rollout_gap": 0.1})]
    (chart,) = [each for each in curves_of({RunId("s"): drifted}) if each["name"] == "rollout_gap"]
    assert chart["series"] == [{"label": "Rollout gap", "values": [0.1]}]


def status_of(**changes: Any) -> dict[str, Any]:
    pool = {
        "base_model": "m", "workers": [], "workers_unavailable": ["w0"],
        "queue": {"oldest_s": 0.0, "oldest_gap_s": 0.0, "oldest_gap_run": ""},
    }  # fmt: skip
    return {
        "reasons": [], "pools": [{**pool, **changes}],
        "disk": {"free_bytes": 10**12, "total_bytes": 10**12},
        "redis": {"memory_bytes": 1, "memory_limit_bytes": 0},
    }  # fmt: skip


def test_a_worker_without_a_heartbeat_is_a_problem_with_a_remedy() -> None:
    (problem,) = problems_of(status_of(), 10**9)
    assert problem.level == "bad"
    assert "w0" in problem.text
    assert "log" in problem.todo
    exits = {"w0": {"text": "restarted 4 times, last reason: No such folder."}}
    (problem,) = problems_of(status_of(worker_exits=exits), 10**9)
    assert problem.todo.startswith("w0: restarted 4 times, last reason: No such folder. Its runs wait")
    assert problems_of(status_of(workers_unavailable=[]), 10**9) == []


@pytest.mark.parametrize("reason", ["No worker for m is running.", "No worker is running."])
def test_a_crash_loop_is_one_problem(reason: str) -> None:
    exits = {"w0": {"text": "restarted 4 times, last reason: No such folder."}}
    looping = status_of(worker_exits=exits)
    looping["reasons"] = [reason, "worker-w0: exited with status 2, 4 times in the last minute"]
    (problem,) = problems_of(looping, 10**9)
    assert problem.text == reason
    assert problem.todo.startswith(f"w0: {exits['w0']['text']} Its runs wait")
    looping["pools"][0]["worker_exits"] = {}  # a loop without stored exits remains visible
    assert len(problems_of(looping, 10**9)) == 2


def test_each_limit_has_a_sentence() -> None:
    assert all(LIMITS.values())


def test_the_worst_problem_comes_first() -> None:
    slow = status_of(
        workers_unavailable=[], queue={"oldest_s": 61.0, "oldest_gap_s": 121.0, "oldest_gap_run": "r:train:0"}
    )
    slow["reasons"] = ["No scheduler is running."]
    slow["redis"] = {"memory_bytes": 8, "memory_limit_bytes": 10}
    slow["disk"] = {"free_bytes": 15 * 10**8, "total_bytes": 10**10}
    found = problems_of(slow, 10**9)
    assert [problem.level for problem in found] == ["bad", *["warn"] * 4]
    assert all(problem.todo for problem in found)
    assert [problem.run for problem in found if problem.run] == ["r:train:0"]


def test_a_disk_below_five_percent_is_a_problem() -> None:
    low = status_of(workers_unavailable=[])
    low["disk"] = {"free_bytes": 49 * 10**8, "total_bytes": 10**11}
    (problem,) = problems_of(low, 10**9)
    assert problem.text.startswith("The disk has 4.")
    low["disk"]["free_bytes"] = 50 * 10**8
    assert problems_of(low, 10**9) == []


def test_numbers_have_units() -> None:
    assert [duration(value) for value in (0, 0.0123, 3.456, 125, 12_000, 200_000, None)] == [
        "0 s", "12.3 ms", "3.46 s", "2 min 5 s", "3 h 20 min", "2 d 7 h", "\u2013",
    ]  # fmt: skip
    assert [short(value) for value in (0, 999, 12_345, 3.2e6)] == ["0", "999", "12.3 k", "3.2 M"]
    assert [size(value) for value in (10, 1500, 3 * 10**9)] == ["10 B", "1.5 kB", "3 GB"]
    assert (percent(0.5), plural(1, "run"), plural(2, "run")) == ("50 %", "1 run", "2 runs")
    assert [age(value) for value in (0.2, 30, 90, 7200, -60)] == [
        "now", "30 s ago", "1 min ago", "2 h ago", "in 1 min",
    ]  # fmt: skip
    assert ago(0.0, 60.0) == (
        '<time datetime="1970-01-01T00:00:00+00:00" title="1970-01-01 00:00:00 UTC">1 min ago</time>'
    )


def test_the_colour_of_a_token_shows_its_probability() -> None:
    assert [level_of(value) for value in (0.0, -0.5, -2.0, -9.0, None)] == [0, 1, 2, 3, 0]


def test_the_busiest_runs_of_a_worker_are_its_current_ones() -> None:
    cycles = [cycle(1, "a", "b", tokens=10), cycle(2, "b", tokens=10)]
    tokens = tokens_of_runs(cycles)
    a, b = RunId("a-session:train:0"), RunId("b-session:train:0")
    assert list(tokens.items()) == [(b, ("b", 20)), (a, ("a", 10))]
    # a has moved since, and ended runs are on no worker
    found = busiest(tokens, {a: WorkerId("w1")})
    assert found == {"w1": [{"run": a, "tenant": "a", "tokens": 10}]}
    many = {RunId(str(n)): ("t", n) for n in range(9)}
    (shown,) = busiest(many, dict.fromkeys(many, WorkerId("w0"))).values()
    assert len(shown) == BUSIEST_SHOWN


def trial(number: int, loss: float | None, **settings: float | str) -> SettingsRow:
    run = run_of(id=RunId(f"s:train:{number}"), user_metadata={"sweep": "x", "trial": number, **settings})
    points = [] if loss is None else [point(3, 2 * loss, 0.0, learning_rate=0.5)]
    return settings_row(run, points)


def test_a_sweep_is_drawn_by_its_settings() -> None:
    rows = [trial(0, 3.0, lr=1e-4, seed=0), trial(1, 1.0, lr=1e-2, seed=0), trial(2, None, lr=1.0)]
    assert rows[0].label == "lr 0.0001, seed 0, rank 8"
    assert trial(3, 2.0, text="no number").settings == {"lr": 0.5, "rank": 8.0}
    chart = loss_by_rate(rows)
    assert chart is not None
    assert (chart["x"], chart["series"][0]["values"]) == ([1e-4, 1e-2], [3.0, 1.0])
    drawn = parallel_coordinates(rows)
    assert drawn is not None
    assert [(a["name"], a["low"], a["high"]) for a in drawn["axes"]] == [
        ("lr", 1e-4, 1e-2), ("last loss", 1.0, 3.0),
    ]  # fmt: skip
    assert [line["points"] for line in drawn["lines"]] == ["40,220 680,40", "40,40 680,220"]


def test_runs_without_differing_settings_are_not_drawn() -> None:
    alike = [trial(0, 3.0, lr=1e-4), trial(1, 1.0, lr=1e-4)]
    for rows in ([], alike[:1], alike):
        assert (loss_by_rate(rows), parallel_coordinates(rows), differing(rows)) == (None, None, [])
