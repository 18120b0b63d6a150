"""Protection against passes that exceed the memory: the kernel may kill the process during one.

A micro-batch larger than any before is recorded in the store while it runs. After a kill, the next process reads
the record. It commits the other requests first. Then it runs the dangerous request alone, with less memory. A
request that killed twice fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId, WorkerId, request_id
from cotrain_store.oplog.execution import CrashCounts
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.engine.device import memory_limit_bytes
from cotrain_workers.engine.ops import Failure, Op, Pass, ReverseKl, UpcomingBatch
from cotrain_workers.engine.trainer import Trainer
from cotrain_workers.engine.training.memory_model import LEAST_TOKENS
from cotrain_workers.recovery.bisection import MAX_CRASHES

log = structlog.get_logger()


@dataclass(frozen=True)
class Kill:
    """Record of a micro-batch during which processes ended."""

    request: str
    """The request with most of its tokens."""
    tokens: int
    worker: str
    """Worker whose processes ended."""
    count: int
    """Number of processes that ended."""


@dataclass(frozen=True)
class Part:
    """Ops of a step that run now. The others return to their queues."""

    ops: Sequence[Op]
    failures: Mapping[tuple[str, int], Failure] = field(default_factory=dict)
    spares: int = 0
    """Tokens of the smallest micro-batch that killed a process; 0 if none did."""
    is_apart: bool = False
    """True if the only op is the dangerous request."""


class LargePasses:
    """Records of one worker about large micro-batches, and the kills that its predecessors left."""

    def __init__(self, engine: Trainer, counts: CrashCounts, worker: WorkerId) -> None:
        self._counts = counts
        self._worker = worker
        self._kills = kills_of(counts.by_part())
        for kill in self._kills:
            # A record of another worker may belong to a process that still runs.
            if kill.worker == worker:
                # Now, because the process may have ended in a replay, which precedes any step.
                engine.spare_memory(kill.tokens)
        self._deferred: set[str] = set()
        self._apart = ""
        """Dangerous request, while it runs alone; else empty."""
        self._largest = dict.fromkeys((False, True), (LEAST_TOKENS, LEAST_TOKENS))
        """Largest micro-batch and longest datum that have run, in tokens, keyed by "needs a gradient"."""
        engine.watch_micro_batches(self._watched)

    def read(self) -> None:
        """Read the records again: a step of another worker may have arrived with its kills."""
        self._kills = kills_of(self._counts.by_part())

    def concern(self, requests: Collection[str]) -> bool:
        """Return True if a process ended during one of these requests."""
        return any(kill.request in requests for kill in self._kills)

    def part_of(self, ops: Sequence[Op]) -> Part:
        """Return the ops of a step that run now: all of them, if no process ended during one."""
        self._apart = ""
        requests = [_request(op) for op in ops]
        kills = [kill for kill in self._kills if kill.request in requests]
        if not kills:
            return Part(ops)
        part = careful_part(ops, kills, self._deferred, memory_limit_bytes())
        self._deferred.update(kill.request for kill in kills)
        for op in ops:
            if (op.run, op.seq) in part.failures:
                log.error("pass_too_large", request=_request(op), tokens=longest_of(op))
        if part.is_apart:
            self._apart = _request(part.ops[0])
            log.warning("large_pass_apart", request=_request(part.ops[0]), tokens=part.spares)
        return part

    def are_over(self, requests: Collection[str]) -> None:
        """Drop the kills of requests that have a result."""
        self._kills = [kill for kill in self._kills if kill.request not in requests]

    @contextmanager
    def _watched(self, batch: UpcomingBatch) -> Iterator[None]:
        tokens, longest = self._largest[batch.needs_grad]
        run, seq = batch.largest
        request = request_id(RunId(run), seq)
        fits = batch.tokens <= tokens and batch.longest <= longest
        if fits and request != self._apart:  # every micro-batch of that request is recorded
            yield
            return
        part = f"{request}@{batch.tokens}/{self._worker}"
        # Without a record it runs all the same; if it kills, bisection finds it.
        with suppress(*CONNECTION_LOST):
            self._counts.risk(part)
        failpoint("worker.before_large_pass", request)
        try:
            yield
        finally:  # also after an out-of-memory error, which this process survives
            with suppress(*CONNECTION_LOST):  # then the commit removes the record
                self._take_back(part)
        self._largest[batch.needs_grad] = max(tokens, batch.tokens), max(longest, batch.longest)

    def _take_back(self, part: str) -> None:
        """Remove the record of this process. Those of its predecessors stay until the request is resolved."""
        if any(part == f"{kill.request}@{kill.tokens}/{kill.worker}" for kill in self._kills):
            self._counts.take_back(part)
        else:
            self._counts.survived(part)


def kills_of(counts: Mapping[str, int]) -> list[Kill]:
    """Return the kills among the crash counts. Pure."""
    return [
        Kill(request, int(tokens), worker, count)
        for part, count in counts.items()
        for request, is_batch, rest in [part.rpartition("@")]
        for tokens, _, worker in [rest.partition("/")]
        if is_batch and count > 0
    ]


def careful_part(
    ops: Sequence[Op], kills: Sequence[Kill], deferred: Collection[str], limit_bytes: int
) -> Part:
    """Return the part of a step that runs now, the ops of each run in order. Pure.

    A request that killed twice is cut into smaller slices. It fails if its longest datum is at least as long as
    the smallest micro-batch that killed. Ops before every dangerous request run first. A request in `deferred`
    has waited for them once, so it runs now, alone.
    """
    spares = min(kill.tokens for kill in kills)
    failures: dict[tuple[str, int], Failure] = {}
    left: list[Op] = []
    for op in ops:
        own = [kill for kill in kills if kill.request == _request(op)]
        if isinstance(op, Pass | ReverseKl) and sum(kill.count for kill in own) >= MAX_CRASHES:
            tokens = min(kill.tokens for kill in own)
            if longest_of(op) >= tokens:
                failures[op.run, op.seq] = too_large(longest_of(op), limit_bytes)
                continue
            op = replace(op, slice_tokens=tokens // 2)
        left.append(op)
    dangerous = {kill.request for kill in kills}
    behind: dict[str, Op] = {}  # first dangerous op of each run
    for op in left:
        if _request(op) in dangerous:
            behind.setdefault(op.run, op)
    others = [op for op in left if op.run not in behind or op.seq < behind[op.run].seq]
    waits = [op for op in behind.values() if _request(op) not in deferred]
    if not behind or (others and waits):
        return Part(others, failures, spares)
    return Part([next(iter(behind.values()))], failures, spares, is_apart=True)


def longest_of(op: Op) -> int:
    """Return the tokens of the longest datum of an op; 0 if it has no data."""
    datums = op.datums if isinstance(op, Pass | ReverseKl) else ()
    return max((len(datum.tokens) for datum in datums), default=0)


def too_large(tokens: int, limit_bytes: int) -> Failure:
    """Return the failure of a pass with a datum that killed two processes, the second time alone."""
    return Failure(
        f"Request needs more memory than the worker has: its process was killed twice while it ran a datum of "
        f"{tokens:,} tokens, within a memory limit of {limit_bytes / 1e9:.1f} GB. Send shorter datums, or ask the "
        f"operator for a worker with more memory.",
        "user",
        "too_large",
    )


def _request(op: Op) -> str:
    return request_id(RunId(op.run), op.seq)
