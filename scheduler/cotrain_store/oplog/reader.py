"""Reads of a run's log for its restore: position, ops and results.

Nothing here writes, so nothing is fenced.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool
from cotrain_store.disk.stored_results import is_spooled, whole_result
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.messages.ids import PoolId, RequestId, RunId, TenantId, decode, run_of, seq_of
from cotrain_store.messages.ops import QueuedOp, Result, Step
from cotrain_store.messages.runs import CheckpointRecord, RunState
from cotrain_store.redis_client.connection import Connection, SyncConnection


@dataclass(frozen=True)
class LogPosition:
    """Position of a run's log: committed up to `done`, with ops from `older_snap` + 1 on.

    Two snapshots are registered: one of the state after `snap`, and its predecessor, after `older_snap`. The log
    reaches back to the older one, so that the loss of the newest file only costs a longer replay. A seq of -1 without a
    file is the empty state, to which the log then reaches back.
    """

    tenant: TenantId
    state: RunState
    done: int
    snap: int
    snapshot_file: str
    snapshot_sha256: str
    older_file: str
    older_sha256: str
    older_snap: int
    numerics_id: str
    """Numerics of the workers that wrote the log since `snap` (`mixed` for several, empty for
    none). A replay by another worker may differ in the last bits.
    """
    older_numerics_id: str  # numerics of the workers that wrote the log since `older_snap`
    weights_epoch: int  # number of rollbacks of the run
    rolled_back_to: str  # path of the checkpoint of the last rollback; empty for none
    steps: Mapping[int, int] = field(default_factory=dict)
    """Seq of each optimizer step in the log to its number."""
    rewinds: Mapping[int, int] = field(default_factory=dict)
    """Seq of each REWIND in the log to the seq to which it returned."""

    @property
    def reaches_start(self) -> bool:
        """True if the log still has all ops of the run."""
        return min(self.snap, self.older_snap) < 0


class RunLogs:
    """Logs of a pool's runs."""

    def __init__(self, connection: SyncConnection, results: Spool, pool: PoolId) -> None:
        self._redis = connection
        self._results = results
        self._pool = pool

    def position(self, run: RunId) -> LogPosition | None:
        """Return the position of a run's log, or None if it has none."""
        raw = self._redis.hgetall(redis_keys.log(self._pool, run))
        row = {field.decode(): value.decode() for field, value in raw.items()}
        return log_position(row) if row else None

    def bases(self, run: RunId) -> frozenset[str]:
        """Return the registered snapshots of a run in any pool: workers of all pools share a folder."""
        files: set[bytes | None] = set()
        for pool in self._redis.hkeys(redis_keys.pools()):
            log = redis_keys.log(PoolId(pool.decode()), run)
            files |= set(self._redis.hmget(log, ["snapfile", "oldfile"]))
        return frozenset(file.decode() for file in files if file)

    def logged_ops(self, run: RunId, first: int, last: int) -> list[QueuedOp]:
        """Return the ops first…last of a run for a replay. Raises SpoolCorrupt: one of them is missing."""
        if last < first:
            return []
        seqs = range(first, last + 1)
        envelopes = self._redis.hmget(redis_keys.ops(self._pool, run), [str(seq) for seq in seqs])
        ops = []
        for seq, envelope in zip(seqs, envelopes, strict=True):
            if envelope is None:
                raise SpoolCorrupt(f"The log of run {run} has no seq {seq}.")
            ops.append(QueuedOp.parse(run, seq, envelope.decode()))
        return ops

    def waiting_after(self, step: Step, max_per_run: int) -> list[QueuedOp]:
        """Return the waiting ops after those of a step: at most `max_per_run` of each run, in order, up to the first gap.

        They may never be planned.
        """
        last = {op.run: op.seq for op in step.ops}  # ops of one run are in order
        pipeline = self._redis.pipeline(transaction=False)
        for run, seq in last.items():
            seqs = range(seq + 1, seq + 1 + max_per_run)
            pipeline.hmget(redis_keys.ops(self._pool, run), [str(each) for each in seqs])
        found = []
        for (run, seq), envelopes in zip(last.items(), pipeline.execute(), strict=True):
            waiting = itertools.takewhile(lambda each: each is not None, envelopes)
            found += [QueuedOp.parse(run, at, envelope.decode()) for at, envelope in enumerate(waiting, start=seq + 1)]
        return found

    def ready_runs(self, count: int) -> list[RunId]:
        """Return at most `count` runnable runs of the pool, longest waiting first.

        The next plan may include some of them, for this worker or another one.
        """
        found = self._redis.zrange(redis_keys.ready(self._pool), 0, count - 1)
        return [RunId(run.decode()) for run in found]

    def stored_result(self, op: QueuedOp) -> Result | None:
        """Return the whole committed result of an op, or None if it has expired or its file is missing."""
        value = self._redis.get(redis_keys.result(op.request_id))
        if not value:
            return None
        result = Result.decode(value)
        try:
            return whole_result(result, self._results) if is_spooled(result) else result
        except SpoolCorrupt:
            return None

    def checkpoints(self, run: RunId) -> list[CheckpointRecord]:
        """Return a run's checkpoints with optimizer state, newest first: the possible targets of a rollback.

        The seq of its weights is the seq after which a checkpoint was made.
        """
        names = self._redis.zrange(redis_keys.run_checkpoints(run), 0, -1)
        of_training = [name.decode() for name in names if name.startswith(b"weights/")]
        rows = self._redis.mget([redis_keys.checkpoint(run, *name.split("/")) for name in of_training] or [""])
        found = [decode(CheckpointRecord, json.loads(row)) for row in rows if row]
        own = [checkpoint for checkpoint in found if run_of(RequestId(checkpoint.weights)) == run]
        return sorted(own, key=lambda checkpoint: seq_of(checkpoint.weights), reverse=True)


def log_position(row: Mapping[str, str]) -> LogPosition:
    """Return the position in a log's hash."""
    numerics, older = row.get("numerics", ""), row.get("oldnumerics", "")
    return LogPosition(
        tenant=TenantId(row["tenant"]),
        state=RunState(row["state"]),
        done=int(row["done"]),
        snap=int(row["snap"]),
        snapshot_file=row.get("snapfile", ""),
        snapshot_sha256=row.get("snapsha", ""),
        older_file=row.get("oldfile", ""),
        older_sha256=row.get("oldsha", ""),
        older_snap=int(row.get("oldsnap", -1)),
        numerics_id=numerics,
        older_numerics_id="mixed" if older and numerics and older != numerics else older or numerics,
        weights_epoch=int(row.get("epoch", 0)),
        rolled_back_to=row.get("rolled_back_to", ""),
        steps=_numbered(row, "step:"),
        rewinds=_numbered(row, "rewind:"),
    )


def _numbered(row: Mapping[str, str], prefix: str) -> dict[int, int]:
    return {int(name.removeprefix(prefix)): int(float(value)) for name, value in row.items() if name.startswith(prefix)}


async def oldest_rewind(connection: Connection, pool: PoolId, run: RunId) -> int | None:
    """Return the oldest optimizer step to which a run can go back; None if there is none."""
    raw = await connection.hgetall(redis_keys.log(pool, run))
    if not raw:
        return None
    position = log_position({name.decode(): value.decode() for name, value in raw.items()})
    return 0 if position.reaches_start else min(position.steps.values(), default=None)
