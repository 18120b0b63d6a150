"""The newest ops of a run's log, with what became of each; and which worker runs are at. Reads only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.keys import result_keys, run_keys
from cotrain_store.messages.ids import WorkerId, request_id
from cotrain_store.messages.ops import QueuedOp
from cotrain_store.messages.results import Result, ResultKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.messages.ids import PoolId, RunId
    from cotrain_store.messages.runs import RunRecord
    from cotrain_store.redis_client.connection import Connection

#: A failure's sentence lies within this; of other results only the first byte is of interest.
_BYTES_READ = 4_096


@dataclass(frozen=True)
class LoggedOp:
    """One op of a log."""

    seq: int
    kind: str
    """Empty where the log has no op of this seq: it never came, or a snapshot covers it."""
    tokens: int
    accepted_at: float | None
    result: ResultKind | None
    """None without one: not done yet, or expired."""
    error: str
    """Why it failed; empty if it did not."""


async def newest_ops(
    connection: Connection, run: RunRecord, last: int, most: int
) -> list[LoggedOp]:
    """Read the ops up to seq `last`, in order; covered ones of which no result is left are left out."""
    seqs = range(max(0, last - most + 1), last + 1)
    if not seqs:
        return []
    pipeline = connection.pipeline(transaction=False)
    pipeline.hmget(run_keys.ops(run.pool, run.id), [str(seq) for seq in seqs])
    for seq in seqs:
        pipeline.getrange(result_keys.result(request_id(run.id, seq)), 0, _BYTES_READ - 1)
    envelopes, *results = await pipeline.execute()
    rows = zip(seqs, envelopes, results, strict=True)
    return [_op(run, *row) for row in rows if row[1] or row[2]]


def _op(run: RunRecord, seq: int, envelope: bytes | None, result: bytes) -> LoggedOp:
    op = QueuedOp.parse(run.id, seq, envelope.decode()) if envelope else None
    return LoggedOp(
        seq=seq,
        kind=op.kind.value if op else "",
        tokens=op.tokens if op else 0,
        accepted_at=op.accepted_at if op else None,
        result=ResultKind(result[:1].decode()) if result else None,
        error=_error(result),
    )


def _error(result: bytes) -> str:
    if result[:1] != ResultKind.FAILURE.encode():
        return ""
    try:
        text = Result.decode(result).json()["error"]
    except (ValueError, KeyError):  # longer than what was read
        return "It failed; its client has the reason."
    return str(text)


async def owners(
    connection: Connection, pool: PoolId, runs: Sequence[RunId]
) -> dict[RunId, WorkerId]:
    """Say which worker each of these runs of a pool is at; those that ended, or have none, are left out."""
    pipeline = connection.pipeline(transaction=False)
    for run in runs:
        pipeline.hmget(run_keys.log(pool, run), ["state", "worker"])
    rows = await pipeline.execute() if runs else []
    return {
        run: WorkerId(worker.decode())
        for run, (state, worker) in zip(runs, rows, strict=True)
        if state == b"live" and worker
    }
