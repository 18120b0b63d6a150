"""A worker's side of the log: read steps and bodies, commit results, register snapshots, end runs.

It is synchronous, like the worker's engine. The worker's epoch fences every write: a worker that
was paused while another took over gets Fenced and must exit.
"""

import json
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool, SpoolReferences
from cotrain_store.disk.stored_results import RUN_STOPPED, UNLOADED, store_results
from cotrain_store.disk.sweep import SweepLease
from cotrain_store.errors import Fenced, SpoolCorrupt
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import OpId, PoolId, RunId, TenantId, WorkerId, decode, encode, request_id, seq_of
from cotrain_store.messages.ops import QueuedOp, Result, RunUsage, Step
from cotrain_store.messages.runs import CheckpointRecord, HistoryEntry, PoolRecord, RunState, SaveRecords
from cotrain_store.oplog.commit_rows import Commit, op_rows, put_backs, rejection, save_row, steps_without
from cotrain_store.oplog.moves import OwnDrain, OwnMoves
from cotrain_store.oplog.reader import LogPosition, RunLogs
from cotrain_store.redis_client.connection import SyncConnection
from cotrain_store.redis_client.scripts import sync_script, worker_args
from cotrain_store.tenants.catalog import TenantNames
from cotrain_store.usage import cycle_counts, minute_of, training_amounts

#: Number of ops before a snapshot whose digests are kept, for very late retries.
DIGESTS_KEPT = 1_024
#: Number of optimizer steps, the first number of a run's packed history (`scripts/lib/history.lua`).
STEPS_OF_HISTORY = struct.Struct("<d")


class CrashCounts:
    """Crash counts of the step parts of one pool.

    It records the parts of steps during which processes crashed, for the next process. The name
    of a part of a step begins with its first request.
    """

    def __init__(self, connection: SyncConnection, pool: PoolId) -> None:
        self._redis = connection
        self._key = redis_keys.crash_counts(pool)

    def by_part(self) -> dict[str, int]:
        """Return the number of crashes during each part of a step."""
        rows = self._redis.hgetall(self._key)
        return {part.decode(): int(count) for part, count in rows.items()}

    def risk(self, part: str) -> None:
        """Count a crash in advance. `survived` removes the count if the process does not crash."""
        self._redis.hincrby(self._key, part, 1)

    def take_back(self, part: str) -> None:
        """Remove one count of `risk`. Counts of other processes stay."""
        self._redis.hincrby(self._key, part, -1)

    def survived(self, part: str) -> None:
        """Remove all counts of `risk`, including those of other processes."""
        self._redis.hdel(self._key, part)


class Execution:
    """Access of one worker to its pool.

    Methods that write to a run's log raise Fenced if another process took over this worker id; nothing was written.
    """

    def __init__(
        self, connection: SyncConnection, spool: Spool, results: Spool, pool: PoolId, worker: WorkerId
    ) -> None:
        self._redis = connection
        self._spool = spool
        self._results = results
        self.pool = pool
        self.worker = worker
        self.logs = RunLogs(connection, results, pool)
        self.crash_counts = CrashCounts(connection, pool)
        self.tenant_names = TenantNames(connection)
        self.drain = OwnDrain(connection, pool, worker)
        self.moves = OwnMoves(connection, pool, worker)
        self.spool_references = SpoolReferences(connection)
        self._commit = sync_script(connection, "commit")
        self._snapshot = sync_script(connection, "snapshot")
        self._rollback = sync_script(connection, "roll_back")
        self._forget = sync_script(connection, "forget")
        self._close = sync_script(connection, "close")
        self.epoch = 0
        self._numerics_id = ""
        self._base_model = ""
        self._left_open: set[int] = set()
        self._begun: set[int] = set()
        """Cycles of `_left_open` that this process has begun to run."""
        self._wakes: Any = None  # redis-py leaves its PubSub untyped

    def claim(self) -> int:
        """Claim this worker's slot with a new epoch. From here on, a predecessor is Fenced."""
        self.epoch = int(self._redis.incr(redis_keys.worker_epoch(self.pool, self.worker)))
        self._left_open = {step.cycle for step in self.open_steps()}
        return self.epoch

    def publish(self, record: PoolRecord) -> None:
        """Publish the pool's capabilities and register this worker in it; called before the first commit."""
        self._numerics_id = record.numerics_id
        self._base_model = record.base_model
        self._redis.sadd(redis_keys.workers(self.pool), self.worker)
        self._redis.hset(redis_keys.pools(), self.pool, encode(record))

    @property
    def _own(self) -> dict[str, Any]:
        return worker_args(self.pool, self.worker, self.epoch)

    @property
    def writer(self) -> str:
        """Unique name of this process over time; valid after `claim`."""
        return f"{self.worker}-{self.epoch}"

    def heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """Publish the worker's heartbeat; raises Fenced if another process took over."""
        current = self._redis.get(redis_keys.worker_epoch(self.pool, self.worker))
        if current is None or int(current) != self.epoch:
            raise Fenced
        text = json.dumps(asdict(heartbeat))
        self._redis.set(redis_keys.worker(self.pool, self.worker), text, px=redis_keys.WORKER_HEARTBEAT_TTL_MS)

    def take_self_check(self) -> float | None:
        """Remove the operator's request for a self-check, and return its time; None if there is none."""
        key = redis_keys.self_checks(self.pool)
        asked_at = self._redis.hget(key, self.worker)
        if asked_at is not None:
            self._redis.hdel(key, self.worker)
        return None if asked_at is None else float(asked_at)

    def leave(self) -> None:
        """Delete the heartbeat, so that it does not first have to expire."""
        if self._wakes:
            self._wakes.close()
            self._wakes = None
        self._redis.delete(redis_keys.worker(self.pool, self.worker))

    def open_steps(self) -> list[Step]:
        """Return the planned and not yet committed steps, oldest first.

        They include those of a dead worker to which this one is the successor.
        """
        rows = self._redis.hvals(redis_keys.open_steps(self.pool, self.worker))
        steps = sorted((Step.parse(row) for row in rows), key=lambda step: step.cycle)
        self._left_open |= {step.cycle for step in steps if step.worker != self.worker}
        return [replace(step, worker=self.worker) for step in steps]

    def crashes(self, step: Step) -> int:
        """Return the number of processes that crashed during a step; 0 for a step planned since this process started.

        The first crash is assumed: that process may have ended before it began the step.
        """
        if step.cycle not in self._left_open:
            return 0
        begun = self._redis.hget(redis_keys.starts(self.pool), str(step.cycle))
        return int(begun or 0) + 1

    def begin(self, step: Step) -> None:
        """Count a crash during a step in advance, because a request that kills a process kills every successor.

        Call it after the step's runs are restored. A crash during the restore is not caused by the step's requests.
        """
        if step.cycle in self._left_open and step.cycle not in self._begun:
            self._redis.hincrby(redis_keys.starts(self.pool), str(step.cycle), 1)
            self._begun.add(step.cycle)

    def leave_in_order(self) -> None:
        """Remove the crash counts of steps that this process leaves open at an orderly end."""
        for cycle in map(int, self._redis.hkeys(redis_keys.open_steps(self.pool, self.worker))):
            if cycle not in self._left_open or cycle in self._begun:
                self._redis.hincrby(redis_keys.starts(self.pool), str(cycle), -1)

    def bodies(self, ops: Sequence[QueuedOp]) -> list[bytes | None]:
        """Return the bodies of ops; None if one is missing or does not match its digest."""
        pipeline = self._redis.pipeline(transaction=False)
        inline = [op for op in ops if op.ref == "inline"]
        for op in inline:
            pipeline.hget(redis_keys.bodies(self.pool, op.run), str(op.seq))
        found = dict(zip(((op.run, op.seq) for op in inline), pipeline.execute(), strict=True))
        spooled = [op for op in ops if op.ref != "inline"]
        if spooled:
            refs = list(dict.fromkeys(op.ref for op in spooled))  # runs of a sweep share bodies
            read = dict(zip(refs, self._spool.read_each(refs), strict=True))
            found |= {(op.run, op.seq): read[op.ref] for op in spooled}
        return [found[op.run, op.seq] for op in ops]

    def steps_of(self, runs: Collection[RunId]) -> dict[RunId, int]:
        """Return the number of committed optimizer steps of some runs, without those that a rewind has abandoned."""
        if not runs:
            return {}
        pipeline = self._redis.pipeline(transaction=False)
        for run in runs:
            pipeline.getrange(redis_keys.history(run), 0, STEPS_OF_HISTORY.size - 1)
        found = [row or bytes(STEPS_OF_HISTORY.size) for row in pipeline.execute()]
        return {run: int(*STEPS_OF_HISTORY.unpack(row)) for run, row in zip(runs, found, strict=True)}

    def commit(
        self,
        step: Step,
        results: Mapping[OpId, Result],
        record: Mapping[str, Any],
        counted: Mapping[str, float],
        crashed: Collection[OpId] = (),
        saves: Mapping[OpId, SaveRecords] | None = None,
        usage: Mapping[RunId, RunUsage] | None = None,
        *,
        opened: Mapping[OpId, int] | None = None,
        found: Mapping[OpId, HistoryEntry] | None = None,
        is_exact: bool = True,
    ) -> None:
        """Make a step's results visible and end its cycle. Idempotent.

        Ops without a result return to the head of their run's queue. They are the last ops of their run in
        the step. If the run has ended, they fail. `opened` holds the ops among them that are open in this
        process, with the tokens executed so far. Each is the first such op of its run.

        `saves` are the records of the successful SAVE ops. The result of a named save appears only when its weights are
        stored (`SavedWeights.mark_stored`). If its name is in use, it fails here and has no weights.

        * `record` is kept in the history of cycles.
        * `counted` is added to the pool's totals, and `usage` to the tenants' usage.
        * Ops in `crashed` changed nothing and must never run again: the log keeps only their seq.
        * `found` has the entries of passes and optimizer steps in the histories of their runs.
        * `is_exact` is False if the last bits may differ from this worker's numerics.
        """
        saved = {request_id(RunId(run), seq): save_row(records) for (run, seq), records in (saves or {}).items()}
        now_s = time.time()
        used = training_amounts(usage or {}, step.tenant_by_run, self._base_model, now_s)
        in_order = [results[op.run, op.seq] for op in step.ops if (op.run, op.seq) in results]

        def commit(encoded: Sequence[tuple[bytes, int]]) -> bytes:
            values, ttls_ms = [value for value, _ in encoded], [ttl_ms for _, ttl_ms in encoded]
            written = Commit(
                **self._own, cycle=str(step.cycle),
                numerics=self._numerics_id if is_exact else "mixed",
                ops=op_rows(step, results, crashed, ttls_ms, found or {}),
                back=put_backs(step, results, opened or {}),
                saves=saved, counted=dict(counted), used=used, time_s=now_s,
                minute=redis_keys.minute(self.pool, minute_of(now_s)),
                minute_counts=cycle_counts(record, usage or {}, step.tenant_by_run),
            )  # fmt: skip
            answer: bytes = self._commit(written, json.dumps(record), *values)
            return answer

        answer = store_results(in_order, self._results, commit)
        if answer == b"ORDER":
            raise AssertionError(f"cycle {step.cycle} holds an op whose predecessor is not committed")

    def register_snapshot(self, run: RunId, seq: int, file: str, sha256: str, size: int = 0) -> bool:
        """Make a complete file of `size` bytes the run's base. The previous base is kept, and the log is cut up to it.

        Return False if it is too late, or too early because the log holds a save whose weights are not stored.
        """
        args = {
            **self._own, "run": run, "seq": seq, "file": file, "sha256": sha256,
            "digests_kept": DIGESTS_KEPT, "size": size,
        }  # fmt: skip
        return bool(self._snapshot(args) == b"OK")

    def roll_back(self, checkpoint: CheckpointRecord, file: str, sha256: str) -> int:
        """Continue a run from a checkpoint after its newest state and both snapshots were lost. Never silent.

        `file` is a complete snapshot, under seq `done`, of the checkpoint's state. Ops accepted so far and not
        committed fail with category server and keep their seq; later ops run. Open steps of this worker then have those
        ops as REJECTED, so they must be read again. Return the run's new weights_epoch.
        Raises SpoolCorrupt if the run has no log.
        """
        position = self.logs.position(checkpoint.run)
        if position is None:
            raise SpoolCorrupt(f"Run {checkpoint.run} has no log.")
        return self._roll_back(position, checkpoint, file, sha256)

    def _roll_back(self, position: LogPosition, checkpoint: CheckpointRecord, file: str, sha256: str) -> int:
        """Roll back a run; a repeat with the position from before has no effect."""
        pool, run, weights_epoch = self.pool, checkpoint.run, position.weights_epoch + 1
        failure, open_steps = _lost_by_rollback(checkpoint, weights_epoch), redis_keys.open_steps(pool, self.worker)
        args = {
            **self._own, "run": run, "done": position.done, "file": file, "sha256": sha256,
            "weights_epoch": weights_epoch, "path": checkpoint.path, "digests_kept": DIGESTS_KEPT,
            "failure": rejection(run, failure),
            "steps": steps_without(self._redis.hgetall(open_steps), run, len(failure.payload)),
            "tenant": position.tenant, "weights": checkpoint.weights,
            "kept": seq_of(checkpoint.weights),
        }  # fmt: skip
        if self._rollback(args) == b"OUTDATED":
            raise AssertionError(f"the log of run {run} moved under the worker that owns it")
        return weights_epoch

    def runs_to_drop(self) -> list[RunId]:
        """Return the closed runs that this worker may still have in memory."""
        members = self._redis.smembers(redis_keys.drops(self.pool, self.worker))
        return sorted(RunId(member.decode()) for member in members)

    def forget(self, run: RunId) -> bool:
        """Delete the log of a closed run. Return False while an op is planned or a save is not stored."""
        return bool(self._forget({**self._own, "run": run}) == b"OK")

    def close_run(self, run: RunId, tenant: TenantId) -> None:
        """End a run whose last save failed; `SavedWeights.mark_stored` ends one whose last save succeeded.

        Pending ops fail, as after `Intake.close_run`. Idempotent.
        """
        self._end_run(run, tenant, RunState.CLOSED, UNLOADED)

    def fail_run(self, run: RunId, tenant: TenantId) -> None:
        """Mark a run as failed. Pending ops fail, planned ops still commit, other runs are unaffected."""
        self._end_run(run, tenant, RunState.FAILED, RUN_STOPPED)

    def _end_run(self, run: RunId, tenant: TenantId, state: RunState, failure: Result) -> None:
        args = {
            **self._own, "run": run, "tenant": tenant, "state": state, "failure": failure.encode().decode(),
            "ttl_ms": redis_keys.SMALL_RESULT_TTL_MS,
        }  # fmt: skip
        self._close(args)

    def sweep_lease(self) -> SweepLease:
        """Return the lease of the worker that sweeps spool and recovery copies."""
        return SweepLease(self._redis, redis_keys.sweeper(), f"{self.pool}/{self.worker}")

    def living_writers(self) -> frozenset[str]:
        """Return the `writer` names of all live workers of any pool."""
        found = set()
        for pool in (PoolId(name.decode()) for name in self._redis.hkeys(redis_keys.pools())):
            members = self._redis.smembers(redis_keys.workers(pool))
            alive = [latest_heartbeat(self._redis, pool, WorkerId(name.decode())) for name in members]
            found |= {f"{worker.id}-{worker.epoch}" for worker in alive if worker}
        return frozenset(found)

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be a step or a run to drop, at most `timeout_s`."""
        if self._wakes is None:
            wakes = self._redis.pubsub(ignore_subscribe_messages=True)
            wakes.subscribe(redis_keys.notify_worker(self.pool, self.worker))
            self._wakes = wakes  # a PubSub without subscription would receive nothing
        self._wakes.get_message(timeout=timeout_s)


def latest_heartbeat(connection: SyncConnection, pool: PoolId, worker: WorkerId) -> WorkerHeartbeat | None:
    """Return the latest heartbeat of a worker id, or None."""
    heartbeat = connection.get(redis_keys.worker(pool, worker))
    return decode(WorkerHeartbeat, json.loads(heartbeat)) if heartbeat else None


def _lost_by_rollback(checkpoint: CheckpointRecord, weights_epoch: int) -> Result:
    return Result.failed(
        "The server lost this run's newest state; it goes on from "
        f"{checkpoint.path} (after request {seq_of(checkpoint.weights)}). "
        f"weights_epoch is now {weights_epoch}.",
        "server",
    )
