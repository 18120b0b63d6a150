"""Let a run go on from a checkpoint when its newest state was lost with a disk. Never silent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cotrain_store.errors import Fenced
from cotrain_store.keys import fleet_keys, result_keys, run_keys
from cotrain_store.messages.encoding import encode
from cotrain_store.messages.ids import run_of, seq_of
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.results import Result
from cotrain_store.oplog.rejection import rejection
from cotrain_store.redis_client.scripts import sync_script

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId, RunId, WorkerId
    from cotrain_store.messages.weights import CheckpointRecord
    from cotrain_store.oplog.reader import LogPosition
    from cotrain_store.redis_client.connection import SyncConnection

#: Digests of this many ops before a snapshot are kept, for retries that come very late.
DIGESTS_KEPT = 1_024


class Rollback:
    """One worker's way to give a run's newest state up."""

    def __init__(self, connection: SyncConnection, pool: PoolId, worker: WorkerId) -> None:
        self._redis = connection
        self._pool = pool
        self._open = fleet_keys.open_steps(pool, worker)
        self._epoch_key = fleet_keys.worker_epoch(pool, worker)
        self._script = sync_script(connection, "roll_back")

    def __call__(
        self,
        epoch: int,
        position: LogPosition,
        checkpoint: CheckpointRecord,
        file: str,
        sha256: str,
    ) -> int:
        """Make `file` the run's only base, as of `position.done`; return the new weights_epoch.

        Raises:
            Fenced: another process took this worker id.
        """
        pool, run, weights_epoch = self._pool, checkpoint.run, position.weights_epoch + 1
        failure = _failure(checkpoint, weights_epoch)
        script_keys = [
            self._epoch_key, run_keys.log(pool, run), run_keys.run(run), self._open,
            run_keys.ops(pool, run), run_keys.bodies(pool, run), run_keys.digests(pool, run),
            result_keys.spool_segment_refs(), run_keys.queue(pool, position.tenant),
            result_keys.notify_results(), fleet_keys.counters(pool),
        ]  # fmt: skip
        args = {
            "epoch": str(epoch), "prefix": fleet_keys.prefix(pool), "run": run, "done": position.done, "file": file, "sha256": sha256,
            "weights_epoch": weights_epoch, "path": checkpoint.path, "digests_kept": DIGESTS_KEPT,
            "failure": rejection(run, failure),
            "steps": self._steps_without(run, len(failure.payload)),
            "tenant": position.tenant, "weights": checkpoint.weights,
            "kept": seq_of(checkpoint.weights),
        }  # fmt: skip
        answer = self._script(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        if answer == b"OUTDATED":
            raise AssertionError(f"the log of run {run} moved under the worker that owns it")
        return weights_epoch

    def _steps_without(self, run: RunId, size: int) -> list[dict[str, str]]:
        """Write each open step with ops of a run as it is, and with those rejected."""
        changes: list[dict[str, str]] = []
        for cycle, text in self._redis.hgetall(self._open).items():
            step = Step.parse(text)
            ops = tuple(_rejected(op, size) if op.run == run else op for op in step.ops)
            if ops != step.ops:
                left = {at: n for at, n in step.allowances.items() if run_of(at) != run}
                after = encode(replace(step, ops=ops, allowances=left))
                changes.append({"cycle": cycle.decode(), "before": text.decode(), "after": after})
        return changes


def _rejected(op: QueuedOp, size: int) -> QueuedOp:
    if op.kind is OpKind.REJECTED:
        return op
    return replace(op, kind=OpKind.REJECTED, tokens=0, size=size, ref="inline")


def _failure(checkpoint: CheckpointRecord, weights_epoch: int) -> Result:
    return Result.failed(
        "The server lost this run's newest state; it goes on from "
        f"{checkpoint.path} (after request {seq_of(checkpoint.weights)}). "
        f"weights_epoch is now {weights_epoch}.",
        "server",
    )
