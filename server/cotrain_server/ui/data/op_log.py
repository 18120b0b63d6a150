"""A run's newest requests as a table: what each was, where it stands, how long it waited and took. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_store.messages.results import ResultKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.monitoring.run_log import LoggedOp


def log_rows(
    ops: Sequence[LoggedOp], cycles: Sequence[Mapping[str, Any]], run: str, planned: int, done: int
) -> list[dict[str, Any]]:
    """List ops, the newest first; `cycles` are the records of the last cycles of the pool."""
    cycle_by_seq = _cycle_by_seq(cycles, run)
    return [_row(op, cycle_by_seq.get(op.seq), planned, done) for op in reversed(ops)]


def _cycle_by_seq(cycles: Sequence[Mapping[str, Any]], run: str) -> dict[int, Mapping[str, Any]]:
    """Find the cycle in which each op of a run ended: the digests there name them."""
    return {
        int(seq): record
        for record in cycles
        for part in record["runs"]
        if part["run"] == run
        for seq in part.get("digests", {})
    }


def _row(op: LoggedOp, cycle: Mapping[str, Any] | None, planned: int, done: int) -> dict[str, Any]:
    started = cycle["started_at"] if cycle else None
    state, kind = _state(op, planned, done)
    return {
        "seq": op.seq,
        "op": op.kind,
        "tokens": op.tokens,
        "state": state,
        "state_kind": kind,
        "accepted_at": op.accepted_at,
        "waited_s": max(0.0, started - op.accepted_at) if started and op.accepted_at else None,
        "cycle": cycle["cycle"] if cycle else None,
        "took_s": cycle["duration_ms"] / 1000 if cycle else None,
        "error": op.error,
    }


def _state(op: LoggedOp, planned: int, done: int) -> tuple[str, str]:
    if op.result is ResultKind.FAILURE:
        return "failed", "bad"
    if op.seq <= done:
        return "done", "ok"
    if op.kind == "":
        return "missing", "warn"
    return ("in a cycle", "info") if op.seq <= planned else ("waiting", "")
