"""Timeline of a session in the format of a trace viewer."""

import json
from typing import Any

from cotrain_server.routes.traces import trace_of

RUN = {"run": "s:train:0", "tokens": 7, "ops": {"forward_backward": 2, "optim_step": 1}, "failed": 0}
CYCLE = {
    "cycle": 3,
    "planned_at": 99.5,
    "started_at": 100.0,
    "duration_ms": 50.0,
    "wave_ms": 30.0,
    "optim_ms": 5.0,
    "sampling_ms": 10.0,
    "outcome": "ok",
    "runs": [RUN],
}


def slices(*cycles: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    events = trace_of("s", cycles)["traceEvents"]
    return [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]


def test_a_cycle_is_drawn_with_its_wait_its_passes_and_its_step() -> None:
    assert slices(CYCLE) == [
        ("planned", 1, 99_500_000, 500_000),
        ("cycle 3", 1, 100_000_000, 50_000),
        ("passes of all runs", 1, 100_000_000, 40_000),
        ("optimizer of all runs", 1, 100_040_000, 5_000),
    ]


def test_a_run_with_only_saves_is_in_no_wave() -> None:
    saved = {**CYCLE, "runs": [{**RUN, "ops": {"save": 1}}]}
    assert [name for name, *_ in slices(saved)] == ["planned", "cycle 3"]


def test_a_cycle_run_op_by_op_has_no_waves() -> None:
    isolated = {**CYCLE, "wave_ms": None, "optim_ms": None, "sampling_ms": None}
    assert [name for name, *_ in slices(isolated)] == ["planned", "cycle 3"]


def test_after_a_clock_change_no_slice_has_a_negative_length() -> None:
    assert slices({**CYCLE, "planned_at": 101.0})[0] == ("planned", 1, 100_000_000, 0)


def test_runs_have_tracks_in_the_order_of_their_creation() -> None:
    later = {**CYCLE, "runs": [{**RUN, "run": f"s:train:{number}"} for number in (10, 2)]}
    names = {
        event["args"]["name"]: event["tid"]
        for event in trace_of("s", [later, CYCLE])["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert names == {"s:train:0": 1, "s:train:2": 2, "s:train:10": 3}


def test_the_file_starts_with_the_marker_of_its_format() -> None:
    assert json.dumps(trace_of("s", [CYCLE])).startswith('{"traceEvents"')
