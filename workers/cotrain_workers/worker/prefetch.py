"""Prefetch of the ops queued behind a step while the engine computes it.

A thread reads and decodes their bodies, and collects the runs whose adapters are likely to be
needed next. It decides nothing: the plan selects the next ops and their order. A decoded op is
used only if its planned body is identical, byte for byte.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.engine.ops import Failure, Pass
from cotrain_workers.op_codec import decode_shared_pass

log = structlog.get_logger()

#: Interval in s of looking for queued ops during a step. Shorter steps have no prefetch.
LOOK_S = 0.1
#: Maximum number of ops per run, and of bytes of all bodies.
MAX_OPS, MAX_BYTES = 8, 256 * 1024**2
#: Maximum number of runs passed to the engine: more adapters than fit on a device.
MAX_RUNS = 256
PASSES = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)


class Prefetcher:
    """Decoder of queued ops in a thread of its own, for one step at a time."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._decoded: dict[QueuedOp, tuple[bytes, Pass | Failure]] = {}
        self._ready: list[RunId] = []

    @contextmanager
    def during(self, step: Step) -> Iterator[None]:
        """Prefetch while a step runs. An error is ignored here, because it repeats when the op itself runs."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._look, args=(step, is_over), name="prefetch")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def ready_runs(self) -> list[RunId]:
        """Return the runs that were last seen ready for a plan, once."""
        found, self._ready = self._ready, []
        return found

    def take(self, op: QueuedOp, body: bytes) -> Pass | Failure | None:
        """Return the decoded request of exactly this body, once; None if there is none."""
        known = self._decoded.pop(op, None)
        return known[1] if known and known[0] == body else None

    def _look(self, step: Step, is_over: threading.Event) -> None:
        # a new thread has an empty context
        structlog.contextvars.bind_contextvars(cycle=step.cycle)
        try:
            while not is_over.wait(LOOK_S):
                self._ready = self._execution.logs.ready_runs(MAX_RUNS)
                self._decode(step, is_over)
        except CONNECTION_LOST as lost:
            log.info("prefetch_stopped", reason=str(lost))
        except Exception:  # prefetching is best effort
            log.exception("prefetch_failed")

    def _decode(self, step: Step, is_over: threading.Event) -> None:
        queued = [op for op in self._execution.logs.behind(step, MAX_OPS) if op.kind in PASSES]
        # Drop decoded ops that were abandoned, or that belong to a run of an earlier step.
        self._decoded = {op: self._decoded[op] for op in queued if op in self._decoded}
        taken = sum({_body_key(op): op.size for op in self._decoded}.values())
        known = {op.ref: each for op, each in self._decoded.items() if op.ref != "inline"}
        for op in queued:
            shared = known.get(op.ref)  # runs of a sweep share bodies
            size = 0 if shared else op.size
            if op in self._decoded or taken + size > MAX_BYTES:
                continue
            if is_over.is_set():
                return
            body = shared[0] if shared else self._execution.bodies([op])[0]
            if body is None:
                continue
            decoded = {op.ref: shared[1]} if shared else {}
            self._decoded[op] = body, decode_shared_pass(op, body, decoded)
            taken += size
            if op.ref != "inline":
                known[op.ref] = self._decoded[op]


def _body_key(op: QueuedOp) -> str:
    return op.request_id if op.ref == "inline" else op.ref
