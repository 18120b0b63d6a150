"""Trace of the cycles of a session's runs for https://ui.perfetto.dev.

The format is the Trace Event Format of Chrome (complete events, `ph: X`; times in µs). In each
cycle a tenant sees its own ops, and the times, which are common to all tenants of the cycle.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_PASSES = ("forward", "forward_backward", "reverse_kl")
_PROCESS = 1


def trace_of(session: str, cycles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one track per run: waiting, the cycle, and within it the passes and the optimizer step."""
    runs = sorted({run["run"] for cycle in cycles for run in cycle["runs"]}, key=lambda r: (len(r), r))
    track_by_run = {run: track for track, run in enumerate(runs, 1)}
    events = [
        _name("process_name", 0, f"session {session}"),
        *(_name("thread_name", track, run) for run, track in track_by_run.items()),
    ]
    for cycle in cycles:
        for run in cycle["runs"]:
            events += _events(cycle, run, track_by_run[run["run"]])
    # The order matters: Perfetto detects the format by the start of the file.
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(cycle: Mapping[str, Any], run: Mapping[str, Any], track: int) -> Iterator[dict[str, Any]]:
    start_us = cycle["started_at"] * 1e6
    planned_us = min(cycle["planned_at"] * 1e6, start_us)
    yield _slice("planned", track, planned_us, start_us - planned_us)
    facts = {name: run[name] for name in ("ops", "tokens", "failed")}
    yield _slice(
        f"cycle {cycle['cycle']}", track, start_us, cycle["duration_ms"] * 1e3, facts | {"outcome": cycle["outcome"]}
    )
    if cycle["wave_ms"] is None:  # executed op by op, without waves
        return
    passes_us = (cycle["wave_ms"] + cycle["sampling_ms"]) * 1e3
    if _has(run, _PASSES):
        sampling = {"of it sampling, ms": cycle["sampling_ms"]}
        yield _slice("passes of all runs", track, start_us, passes_us, sampling)
    if _has(run, ("optim_step",)):
        yield _slice("optimizer of all runs", track, start_us + passes_us, cycle["optim_ms"] * 1e3)


def _has(run: Mapping[str, Any], kinds: Iterable[str]) -> bool:
    return any(kind in run["ops"] for kind in kinds)


def _slice(
    name: str, track: int, start_us: float, length_us: float, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    span = {"pid": _PROCESS, "tid": track, "ts": round(start_us), "dur": max(0, round(length_us))}
    return {"name": name, "ph": "X", **span, "args": dict(facts or {})}


def _name(what: str, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}
