"""Reads of a run's log for its restore (position, ops, results), and of its history as the client receives it.

Nothing here writes, so nothing is fenced.
"""

import itertools
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cotrain.wire.rest import HistoryPoint, MetricPoint
from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool
from cotrain_store.disk.storage import is_spooled, whole_result
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.messages.ids import PoolId, RequestId, RunId, TenantId, decode, run_of, seq_of
from cotrain_store.messages.ops import QueuedOp, Result, Step
from cotrain_store.messages.runs import CheckpointRecord, RunState
from cotrain_store.redis_client.connection import Connection, SyncConnection

PointKind = Literal["optim_step", "forward"]
#: Format of a point in `scripts/lib/history.lua`: ordinal, step, seq, time, loss, weight, gradient
#: norm, learning rate, tokens, tokens of the run, passes. Then follows the drift of policy losses, the last nine
#: fields of `PassEntry` (`runs.py`); points without it are shorter. Doubles are stored bit for bit.
POINT = struct.Struct("<IIQdddddQQIddddddddd")
#: Format of a metric's point in `scripts/lib/history.lua`: ordinal, step, seq, time, sum, weight.
METRIC_POINT = struct.Struct("<IIQddd")


@dataclass(frozen=True)
class LogPosition:
    """Position of a run's log: committed up to `done`, with ops from `older_snap` + 1 on.

    Two snapshots are registered: one of the state after `snap`, and its predecessor, after
    `older_snap`. The log reaches back to the older one, so that the loss of the newest file only
    costs a longer replay. A seq of -1 without a file is the empty state, to
    which the log then reaches back.
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
        """Return the registered snapshots of a run in any pool: workers of all pools share a
        folder.
        """
        files: set[bytes | None] = set()
        for pool in self._redis.hkeys(redis_keys.pools()):
            log = redis_keys.log(PoolId(pool.decode()), run)
            files |= set(self._redis.hmget(log, ["snapfile", "oldfile"]))
        return frozenset(file.decode() for file in files if file)

    def logged_ops(self, run: RunId, first: int, last: int) -> list[QueuedOp]:
        """Return the ops first…last of a run for a replay.

        Raises:
            SpoolCorrupt: one of them is missing.
        """
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

    def behind(self, step: Step, most: int) -> list[QueuedOp]:
        """Return the waiting ops after those of a step: at most `most` of each run, in order, up to
        the first gap.

        They may never be planned.
        """
        last = {op.run: op.seq for op in step.ops}  # ops of one run are in order
        pipeline = self._redis.pipeline(transaction=False)
        for run, seq in last.items():
            seqs = range(seq + 1, seq + 1 + most)
            pipeline.hmget(redis_keys.ops(self._pool, run), [str(each) for each in seqs])
        found = []
        for (run, seq), envelopes in zip(last.items(), pipeline.execute(), strict=True):
            waiting = itertools.takewhile(lambda each: each is not None, envelopes)
            found += [QueuedOp.parse(run, at, envelope.decode()) for at, envelope in enumerate(waiting, start=seq + 1)]
        return found

    def ready_runs(self, most: int) -> list[RunId]:
        """Return at most `most` runnable runs of the pool, longest waiting first.

        The next plan may include some of them, for this worker or another one.
        """
        found = self._redis.zrange(redis_keys.ready(self._pool), 0, most - 1)
        return [RunId(run.decode()) for run in found]

    def stored_result(self, op: QueuedOp) -> Result | None:
        """Return the whole committed result of an op, or None if it has expired or its file is
        missing.
        """
        value = self._redis.get(redis_keys.result(op.request_id))
        if not value:
            return None
        result = Result.decode(value)
        try:
            return whole_result(result, self._results) if is_spooled(result) else result
        except SpoolCorrupt:
            return None

    def checkpoints(self, run: RunId) -> list[CheckpointRecord]:
        """Return a run's checkpoints with optimizer state, newest first: the possible targets of a
        rollback.

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


async def metric_names(connection: Connection, run: RunId) -> frozenset[str]:
    """Return the names of a run's own metrics. The caller has checked the tenant."""
    return frozenset(name.decode() for name in await connection.hkeys(redis_keys.metric_names(run)))


async def read_metrics(connection: Connection, run: RunId, after_step: int = -1) -> dict[str, list[MetricPoint]]:
    """Return the points of a run's own metrics after a step, by name. The caller has checked the
    tenant.
    """
    names = sorted(await metric_names(connection, run))
    pipeline = connection.pipeline(transaction=True)
    for name in names:
        pipeline.lrange(redis_keys.metric(run, name), 0, -1)
    rows = await pipeline.execute() if names else []
    found = {
        name: [point for point in read_metric(row) if point.step > after_step]
        for name, row in zip(names, rows, strict=True)
    }
    return {name: points for name, points in found.items() if points}


def read_metric(stored: Iterable[bytes]) -> list[MetricPoint]:
    """Return the points of one metric, in order, from the rows that the script packed."""
    points, before = [], 0
    for row in stored:
        number, step, seq, time_s, total, weight = METRIC_POINT.unpack(row)
        value = total / weight if weight > 0 else total
        points.append(MetricPoint(step=step, steps=number - before, seq=seq, time_s=time_s, value=value))
        before = number
    return points


async def read_history(connection: Connection, run: RunId, after_step: int = -1) -> list[HistoryPoint]:
    """Return the points after a step of a run, in the order of its log. The caller has checked the
    tenant.
    """
    pipeline = connection.pipeline(transaction=True)  # a transaction, because a rollback cuts both lists at once
    pipeline.lrange(redis_keys.steps(run), 0, -1)
    pipeline.lrange(redis_keys.evaluations(run), 0, -1)
    steps, evaluations = await pipeline.execute()
    points = read_points("optim_step", steps) + read_points("forward", evaluations)
    return sorted((p for p in points if p.step > after_step), key=lambda point: point.seq)


def read_points(kind: PointKind, stored: Iterable[bytes]) -> list[HistoryPoint]:
    """Return the points of one kind, in order, from the rows that the script packed."""
    points, before = [], 0
    for row in stored:
        whole = POINT.unpack(row.ljust(POINT.size, b"\0"))
        number, step, seq, time_s, loss, weight, norm, rate, tokens, run_tokens, passes = whole[:11]
        sampled, gap, gap_max, effective, bounded, clipped, lagged, lag, lag_max = whole[11:]
        is_step = kind == "optim_step"
        points.append(
            HistoryPoint(
                kind=kind,
                step=step,
                steps=number - before,
                seq=seq,
                time_s=time_s,
                loss_sum=loss,
                weight_sum=weight,
                grad_norm=norm if is_step else None,
                learning_rate=rate if is_step else None,
                tokens=tokens,
                run_tokens=run_tokens,
                passes=passes,
                rollout_gap=gap / sampled if sampled else None,
                rollout_gap_max=gap_max if sampled else None,
                effective_sample_size=effective / sampled if sampled else None,
                clip_fraction=clipped / bounded if bounded else None,
                policy_lag=lag / lagged if lagged else None,
                policy_lag_max=lag_max if lagged else None,
            )
        )
        before = number
    return points
