"""Search for the request that breaks the engine or crashes its process, while the others run.

**Exceptions** are located at once: each run returns to its last committed state and its ops run one by one.

**Crashes** leave no process to report them. Each group of a step's ops is therefore recorded in the store before it
runs, and removed afterwards. A group that is still recorded at the next start is split in halves, first between two
runs, then within one (bisection). The split ends at a single op during which MAX_CRASHES processes crashed.

**Too little memory**: the kernel may kill the process during a large pass. A micro-batch larger than any before is
recorded in the store while it runs. The next process after a kill reads the record and calls the request with most of
its tokens *dangerous*. It first commits the other requests. Then it runs the dangerous request alone, with less memory.
After a second kill, the request runs in smaller slices. It fails if one datum alone is too long.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import OpId, RequestId, RunId, WorkerId, request_id
from cotrain_store.messages.ops import Step
from cotrain_store.oplog.execution import CrashCounts
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.engine.host import memory_limit_bytes
from cotrain_workers.engine.ops import CycleOutput, Failure, Op, Output, Pass, ReverseKl, UpcomingBatch
from cotrain_workers.engine.training.memory_model import LEAST_TOKENS
from cotrain_workers.group.engine import WorkerEngine

log = structlog.get_logger()

#: Number of crashes after which a step is split in halves, and after which a single op counts as
#: the cause.
MAX_CRASHES = 2
#: Failures of a request that breaks the engine, and of one that crashes it. Neither may ever run
#: again, not even in a replay.
CRASHED = Failure("Internal error: this request could not be run.", "server")
POISON = Failure("Request repeatedly crashed the worker; it was not applied.", "server")


@dataclass
class CombinedOutputs:
    """Outputs of ops that ran in several engine cycles."""

    outputs: dict[OpId, Output] = field(default_factory=dict)
    is_exact: bool = True
    """False if memory ran out in one of them, or in a replay (`CycleOutput.is_exact`)."""

    def add(self, more: CycleOutput | CombinedOutputs) -> None:
        """Add the outputs of further ops."""
        self.outputs.update(more.outputs)
        self.is_exact = self.is_exact and more.is_exact


@dataclass
class Risks:
    """Crashes of processes that ran a step, and the record of ops that may crash this one, for its successor."""

    cycle: int
    count: int  # number of processes that crashed with this step open
    _counts: CrashCounts
    _await_writes: Callable[[], None]
    """Returns once no save and no copy is in progress.

    Otherwise a crash caused by one of those would be counted against an innocent request.
    """
    _noted: str | None = None

    @property
    def is_deadly(self) -> bool:
        """True if the step crashed at least MAX_CRASHES times, which excludes chance."""
        return self.count >= MAX_CRASHES

    @cached_property
    def by_group(self) -> Mapping[str, int]:
        """Number of processes that crashed during each group of ops, as of the first use."""
        return self._counts.by_part()

    def is_poison(self, op: Op) -> bool:
        """Return True if processes crashed during this op alone, too often for chance."""
        return self.by_group.get(request_of(op), 0) >= MAX_CRASHES

    def note(self, group: Sequence[Op]) -> None:
        """Count a crash in advance. `survived` removes it, if this process still runs to call it."""
        self.survived()  # the earlier group may have raised, or its response was lost
        self._await_writes()
        self._noted = name_of(group)
        self._counts.risk(self._noted)
        failpoint("worker.before_risk", map(request_of, group))

    def survived(self) -> None:
        """Remove the record of the current group, including a predecessor's, because it does not crash."""
        if self._noted is not None:
            failpoint("worker.after_risk", self._noted)
            self._counts.survived(self._noted)
            self._noted = None


def run_in_groups(
    engine: WorkerEngine, risks: Risks, ops: Sequence[Op], run_separately: Callable[[str], CombinedOutputs]
) -> CombinedOutputs:
    """Run a step that crashed its processes: in halves, and without the ops that crash.

    `run_separately` runs one run's ops from its last committed state (`run_alone`). It is called
    where a group raises.
    """
    ran = CombinedOutputs()
    separate: set[str] = set()
    for group in groups_of(ops, {*risks.by_group, name_of(ops)}):
        if group[0].run in separate:
            continue  # an earlier group of this run raised
        if len(group) == 1 and risks.is_poison(group[0]):
            ran.outputs[group[0].id] = POISON
            continue
        risks.note(group)
        try:
            ran.add(engine.run(group))
        except Exception:
            log.exception("group_failed", group=name_of(group))
        else:
            risks.survived()
            continue
        engine.check_device()
        for run in dict.fromkeys(op.run for op in group):
            ran.add(run_separately(run))
            separate.add(run)
    return ran


def groups_of(ops: Sequence[Op], crashed: Collection[str]) -> list[Sequence[Op]]:
    """Split ops, those of a run adjacent, until no group is one during which a process crashed. Pure."""
    if len(ops) == 1 or name_of(ops) not in crashed:
        return [ops]
    half = len(ops) // 2
    borders = [at for at in range(1, len(ops)) if ops[at].run != ops[at - 1].run]
    at = min(borders or [half], key=lambda border: abs(border - half))
    return groups_of(ops[:at], crashed) + groups_of(ops[at:], crashed)


def name_of(group: Sequence[Op]) -> str:
    """Return the name of a group of ops: its request, or its first and last."""
    first, last = request_of(group[0]), request_of(group[-1])
    return first if len(group) == 1 else f"{first}..{last}"


def run_alone(
    engine: WorkerEngine, ops: Sequence[Op], reload_state: Callable[[], bool], risks: Risks | None
) -> CombinedOutputs:
    """Run one run's ops repeatedly, each time without one more op that breaks the engine.

    `reload_state` restores the last committed state of the run, and returns True if it did so to
    the bit. With `risks` each op may crash.
    """
    failed: dict[OpId, Output] = {op.id: POISON for op in ops if risks is not None and risks.is_poison(op)}
    while True:
        ran = CombinedOutputs(dict(failed), is_exact=reload_state())
        left = [op for op in ops if op.id not in failed]
        failing = _run_one_by_one(engine, left, ran, risks)
        if failing is None:
            return ran
        failed[failing.id] = CRASHED


def _run_one_by_one(engine: WorkerEngine, ops: Sequence[Op], ran: CombinedOutputs, risks: Risks | None) -> Op | None:
    """Fill `ran` up to the first op that breaks the engine, and return that op."""
    for op in ops:
        if risks is not None:
            risks.note([op])
        try:
            ran.add(engine.run([op]))
        except Exception:
            log.exception("op_failed", request=request_of(op), run=op.run, seq=op.seq)
        else:
            if risks is not None:
                risks.survived()
            continue
        engine.check_device()
        return op
    return None


def request_of(op: Op) -> RequestId:
    """Return the request of an op."""
    return request_id(RunId(op.run), op.seq)


class LargePasses:
    """Records of one worker about large micro-batches, and the kills that earlier processes left."""

    def __init__(self, engine: WorkerEngine, counts: CrashCounts, worker: WorkerId) -> None:
        self._counts = counts
        self._worker = worker
        self._kills = kills_of(counts.by_part())
        for kill in self._kills:
            # A record of another worker may belong to a process that still runs.
            if kill.worker == worker:
                # Before any step, because the process may have ended in a replay.
                engine.spare_memory(kill.tokens)
        self._deferred: set[str] = set()  # dangerous requests that other requests were run before
        self._running_alone = ""  # dangerous request that runs alone now; else empty
        self._proven = dict.fromkeys((False, True), (LEAST_TOKENS, LEAST_TOKENS))
        """Tokens of the largest micro-batch and of the longest datum that ran to their end, by `needs_grad`."""
        engine.watch_micro_batches(self._recorded)

    def read(self) -> None:
        """Read the records again: a step of another worker may have arrived with its kills."""
        self._kills = kills_of(self._counts.by_part())

    def has_kill_of(self, step: Step) -> bool:
        """Return True if a process ended during one of a step's requests."""
        return any(op.request_id == kill.request for kill in self._kills for op in step.ops)

    def select(self, ops: Sequence[Op]) -> Selection:
        """Return the ops of a step that run now: all of them, if no process ended during one."""
        self._running_alone = ""
        requests = [request_of(op) for op in ops]
        kills = [kill for kill in self._kills if kill.request in requests]
        if not kills:
            return Selection(ops)
        selected = select_ops(ops, kills, self._deferred, memory_limit_bytes())
        self._deferred.update(kill.request for kill in kills)
        for op in ops:
            if op.id in selected.failures:
                log.error("pass_too_large", request=request_of(op), tokens=longest_of(op))
        if selected.is_alone:
            self._running_alone = request_of(selected.ops[0])
            log.warning("large_pass_apart", request=self._running_alone, tokens=selected.killing_tokens)
        return selected

    def forget(self, requests: Collection[str]) -> None:
        """Drop the kills of requests that have a result."""
        self._kills = [kill for kill in self._kills if kill.request not in requests]

    @contextmanager
    def _recorded(self, batch: UpcomingBatch) -> Iterator[None]:
        """Record a micro-batch while it runs, unless it is as small as one that ran to its end.

        Every micro-batch of a request that runs alone is recorded.
        """
        tokens, longest = self._proven[batch.needs_grad]
        run, seq = batch.largest
        request = request_id(RunId(run), seq)
        is_proven = batch.tokens <= tokens and batch.longest <= longest
        if is_proven and request != self._running_alone:
            yield
            return
        part = _part_name(request, batch.tokens, self._worker)
        # Without a record it runs all the same; if it kills, bisection finds it.
        with suppress(*CONNECTION_LOST):
            self._counts.risk(part)
        failpoint("worker.before_large_pass", request)
        try:
            yield
        finally:  # also after an out-of-memory error, which this process survives
            with suppress(*CONNECTION_LOST):  # then the commit removes the record
                self._remove_record(part)
        self._proven[batch.needs_grad] = max(tokens, batch.tokens), max(longest, batch.longest)

    def _remove_record(self, part: str) -> None:
        """Remove the record of this process. Those of earlier processes stay until the request is resolved."""
        if any(part == _part_name(kill.request, kill.tokens, kill.worker) for kill in self._kills):
            self._counts.take_back(part)
        else:
            self._counts.survived(part)


@dataclass(frozen=True)
class Kill:
    """Record of a micro-batch during which processes ended."""

    request: str  # the request with most of its tokens
    tokens: int
    worker: str  # worker whose processes ended
    count: int  # number of processes that ended


@dataclass(frozen=True)
class Selection:
    """Ops of a step that run now. The others return to their queues."""

    ops: Sequence[Op]
    failures: Mapping[OpId, Failure] = field(default_factory=dict)
    killing_tokens: int = 0
    """Tokens of the smallest micro-batch that killed a process; 0 if none did."""
    is_alone: bool = False  # True if the only op is a dangerous request


def _part_name(request: str, tokens: int, worker: str) -> str:
    """Return the name of a micro-batch among the crash counts. `kills_of` parses it."""
    return f"{request}@{tokens}/{worker}"


def kills_of(counts: Mapping[str, int]) -> list[Kill]:
    """Return the kills among the crash counts, whose other parts are groups of ops. Pure."""
    kills = []
    for part, count in counts.items():
        request, is_micro_batch, rest = part.rpartition("@")
        if is_micro_batch and count > 0:
            tokens, _, worker = rest.partition("/")
            kills.append(Kill(request, int(tokens), worker, count))
    return kills


def select_ops(ops: Sequence[Op], kills: Sequence[Kill], deferred: Collection[str], limit_bytes: int) -> Selection:
    """Return the ops of a step that run now, those of each run in order. Pure.

    Ops before the first dangerous request of their run go first. Then one dangerous request runs alone. The
    requests in `deferred` have let other ops go first once, and do not wait again.

    A request that killed twice is cut into slices of half the smallest micro-batch that killed. It fails if its
    longest datum has as many tokens as that micro-batch, because a datum is not cut.
    """
    killing_tokens = min(kill.tokens for kill in kills)
    failures: dict[OpId, Failure] = {}
    remaining: list[Op] = []
    for op in ops:
        own = [kill for kill in kills if kill.request == request_of(op)]
        if isinstance(op, Pass | ReverseKl) and sum(kill.count for kill in own) >= MAX_CRASHES:
            tokens = min(kill.tokens for kill in own)
            if longest_of(op) >= tokens:
                failures[op.id] = too_large(longest_of(op), limit_bytes)
                continue
            op = replace(op, slice_tokens=tokens // 2)
        remaining.append(op)
    dangerous = {kill.request for kill in kills}
    first_dangerous: dict[str, Op] = {}  # by run
    for op in remaining:
        if request_of(op) in dangerous:
            first_dangerous.setdefault(op.run, op)
    harmless = [op for op in remaining if op.run not in first_dangerous or op.seq < first_dangerous[op.run].seq]
    may_wait = any(request_of(op) not in deferred for op in first_dangerous.values())
    if not first_dangerous or (harmless and may_wait):
        return Selection(harmless, failures, killing_tokens)
    return Selection([next(iter(first_dangerous.values()))], failures, killing_tokens, is_alone=True)


def longest_of(op: Op) -> int:
    """Return the tokens of the longest datum of an op; 0 if it has no data."""
    datums = op.datums if isinstance(op, Pass | ReverseKl) else ()
    return max((len(datum.tokens) for datum in datums), default=0)


def too_large(tokens: int, limit_bytes: int) -> Failure:
    """Return the failure of a pass with a datum that killed two processes, at the second kill in a pass that ran
    alone.
    """
    return Failure(
        f"Request needs more memory than the worker has: its process was killed twice while it ran a datum of "
        f"{tokens:,} tokens, within a memory limit of {limit_bytes / 1e9:.1f} GB. Send shorter datums, or ask the "
        f"operator for a worker with more memory.",
        "user",
        "too_large",
    )
