"""Worker that computes nothing: it commits every planned op with one small result.

    python -m bench.load.null_worker [--ops-per-s N] [--ops-per-cycle N]

It uses the real log: steps, bodies, commits, and registration of recovery copies. A load test therefore measures
everything but the engine.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

from cotrain_store.bodies.pass_body import encode_pass_output
from cotrain_store.disk.spool import RESULTS, Spool, new_writer
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind, Step
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import open_sync_connection

POOL = PoolRecord(
    id=PoolId("p-null"), base_model="null", architecture="null", vocab_size=512, context_length=1024,
    max_rank=64, num_parameters=1, device="none", dtype="float32", numerics_id="null",
    tokens_per_s=1e9, max_sequence_tokens=1024, sampler="engine",
)  # fmt: skip
WORKER = WorkerId("w0")
#: Tokens of every op of the load; makes a token budget a budget of ops.
TOKENS_PER_OP = 32
#: Number of ops after which a run's log is cut, as by a worker that writes recovery copies.
OPS_PER_SNAPSHOT = 32
BEAT_S = 1.0
CLOCK_PERIOD_S = 10.0
_PASSED = Result(ResultKind.PASS, encode_pass_output([np.zeros(TOKENS_PER_OP, np.float32)], {"loss:sum": 1.0}))
_DONE = Result.of_json({"type": "done"})


class NullWorker:
    """Worker that commits steps until it is killed."""

    def __init__(self, execution: Execution, ops_per_s: float, ops_per_cycle: int) -> None:
        self._execution, self._ops_per_s, self._ops_per_cycle = execution, ops_per_s, ops_per_cycle
        self._beat_at = 0.0
        self._snapshots: dict[RunId, int] = {}

    def run(self) -> None:
        while True:
            self._beat()
            steps = self._execution.open_steps()
            if steps:
                self._commit(steps[0])
            else:
                self._execution.wait(0.2)

    def _commit(self, step: Step) -> None:
        bodies = self._execution.bodies(step.ops)
        assert None not in bodies
        if self._ops_per_s:
            time.sleep(len(step.ops) / self._ops_per_s)
        results = {op.id: _result(op) for op in step.ops}
        self._execution.commit(step, results, {"cycle": step.cycle, "ops": len(step.ops)}, {})
        for op in step.ops:
            if op.seq - self._snapshots.get(op.run, 0) >= OPS_PER_SNAPSHOT:
                self._execution.register_snapshot(op.run, op.seq, f"{op.run}-{op.seq}", "0" * 64)
                self._snapshots[op.run] = op.seq

    def _beat(self) -> None:
        now = time.time()
        if now - self._beat_at < BEAT_S:
            return
        self._beat_at = now
        # The planner fills a cycle with the work of one clock period.
        tokens_per_s = self._ops_per_cycle * TOKENS_PER_OP / CLOCK_PERIOD_S
        beat = WorkerHeartbeat(WORKER, self._execution.epoch, "serving", "none", tokens_per_s, 0, 0, now)
        self._execution.heartbeat(beat)


def publish_pool(redis_url: str, spool: Spool) -> None:
    """Publish the pool before its worker starts, as if an earlier worker had crashed."""
    connection = open_sync_connection(redis_url)
    execution = Execution(connection, spool, spool, POOL.id, WORKER)
    execution.claim()
    execution.publish(POOL)
    connection.close()


def _result(op: QueuedOp) -> Result:
    if op.kind is OpKind.CREATE:
        return Result.of_json({"model_id": op.run, "type": "create_model"})
    return _PASSED if op.kind in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD) else _DONE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops-per-s", type=float, default=0.0)
    parser.add_argument("--ops-per-cycle", type=int, default=2048)
    args = parser.parse_args()
    folder = Path(os.environ["COTRAIN_DATA_DIR"]) / "spool"
    connection = open_sync_connection(os.environ["COTRAIN_REDIS_URL"])
    writer = new_writer("null")
    execution = Execution(connection, Spool(folder, writer), Spool(folder, RESULTS + writer), POOL.id, WORKER)
    execution.claim()
    execution.publish(POOL)
    NullWorker(execution, args.ops_per_s, args.ops_per_cycle).run()


if __name__ == "__main__":
    main()
