"""Prefetch what is queued after a step while the engine computes that step: bodies are read and decoded,
and the runs whose adapters are likely to be needed next are noted.

Decides nothing: which ops run next, and in what order, is the plan's. An op whose body is the same, byte
for byte, when it is planned is not decoded again; of any other, nothing here is used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.engine.ops import Failure, Pass
from cotrain_workers.op_codec import decode_op_pass

log = structlog.get_logger()

#: How often to look for queued ops during a step; a shorter step is left alone.
LOOK_S = 0.1
#: Of each run, how many ops to look at, and how large the bodies of all may be.
MAX_OPS, MAX_BYTES = 8, 256 * 1024**2
#: How many runs to tell the engine of: more adapters than a device holds.
MAX_RUNS = 256
PASSES = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)


class Prefetcher:
    """Decodes in a thread of its own; one step at a time."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._decoded: dict[QueuedOp, tuple[bytes, Pass | Failure]] = {}
        self._ready: list[RunId] = []

    @contextmanager
    def during(self, step: Step) -> Iterator[None]:
        """Prefetch for as long as a step runs. What fails here will fail again where it counts."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._look, args=(step, is_over), name="prefetch")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def ready_runs(self) -> list[RunId]:
        """Return the runs that were last seen to wait for a plan, once."""
        found, self._ready = self._ready, []
        return found

    def take(self, op: QueuedOp, body: bytes) -> Pass | Failure | None:
        """Return what this very body was decoded to, once; None if it was not."""
        known = self._decoded.pop(op, None)
        return known[1] if known and known[0] == body else None

    def _look(self, step: Step, is_over: threading.Event) -> None:
        structlog.contextvars.bind_contextvars(cycle=step.cycle)  # a thread begins without
        try:
            while not is_over.wait(LOOK_S):
                self._ready = self._execution.logs.ready_runs(MAX_RUNS)
                self._decode(step, is_over)
        except CONNECTION_LOST as lost:
            log.info("prefetch_stopped", reason=str(lost))
        except Exception:  # the step shall not suffer from what is only a convenience
            log.exception("prefetch_failed")

    def _decode(self, step: Step, is_over: threading.Event) -> None:
        queued = [op for op in self._execution.logs.behind(step, MAX_OPS) if op.kind in PASSES]
        # What was given up, or belongs to a run of an earlier step, is not waited for.
        self._decoded = {op: self._decoded[op] for op in queued if op in self._decoded}
        taken = sum(op.size for op in queued if op in self._decoded)
        for op in queued:
            if op in self._decoded or taken + op.size > MAX_BYTES:
                continue
            if is_over.is_set():
                return
            (body,) = self._execution.bodies([op])
            if body is not None:
                self._decoded[op] = body, decode_op_pass(op, body)
                taken += op.size
