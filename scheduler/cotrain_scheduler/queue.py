"""Queue of one pool in memory: pending ops by worker. Pure.

Callers pass in all changes; the queue never reads the store. Each change, and each lookup of one run, costs the
same however many runs wait. Within a tenant, the least recently served run comes first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from cotrain_scheduler.moving import Load, load_of
from cotrain_scheduler.placement import Candidate, RecentTokens, best, fits_one_more, rates
from cotrain_scheduler.waiting import Waiting
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.messages.ops import QueuedOp, RunQueue


class PoolQueue:
    """Runnable runs of a pool, each at its current or assigned worker."""

    def __init__(self, window_ops: int) -> None:
        """Create a queue; the log of a run with `window_ops` ops here may contain more."""
        self._window_ops = window_ops
        self._runs: dict[RunId, RunQueue] = {}
        self._at: dict[RunId, WorkerId | None] = {}
        self._waiting: defaultdict[WorkerId | None, Waiting] = defaultdict(Waiting)
        self._tokens: Counter[WorkerId | None] = Counter()
        """Tokens waiting for each worker; for a run with a full window, only those in the window."""
        self.recent = RecentTokens()
        self._workers: list[WorkerId] = []
        self.unread: set[RunId] = set()
        """Runs whose log differs from this queue, or contains more, and must be read."""

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, run: RunId) -> RunQueue:
        return self._runs[run]

    def clear(self) -> None:
        """Remove every run."""
        for queue in list(self._runs.values()):
            self._remove(queue)
        self.unread.clear()

    def put(self, queues: Iterable[RunQueue]) -> None:
        """Update runs as they were read; a run without ops is removed. The others keep their turn."""
        for queue in queues:
            self.unread.discard(queue.run)
            known = self._runs.get(queue.run)
            if known and queue.ops and queue.worker == known.worker:
                self._runs[queue.run] = queue
                worker = self._at[queue.run]
                self._waiting[worker].replace(known, queue)
                self._tokens[worker] += tokens_of(queue) - tokens_of(known)
                continue
            if known:
                self._remove(known)
            if queue.ops:
                self._add(queue, queue.worker)

    def assign(self, workers: Sequence[WorkerHeartbeat], now: float) -> None:
        """Assign every run without a worker to the one that would finish first; again if workers change."""
        names = sorted(worker.id for worker in workers)
        if names != self._workers:
            self._workers = names
            self._move([queue for queue in self._runs.values() if queue.worker is None], None)
        fits = {worker.id: fits_one_more(worker) for worker in workers}
        tokens_per_s = rates(workers)
        while workers and (unplaced := self._waiting.get(None)):
            queue = next(iter(unplaced))
            chosen = best([
                Candidate(
                    worker.id, self._tokens[worker.id] + self.recent.of(worker.id, now),
                    tokens_per_s[worker.id], fits_one_more=fits[worker.id],
                )
                for worker in workers
            ])  # fmt: skip
            self.recent.settle(queue.run, chosen, now)
            self._move([queue], chosen)
        self._waiting[None].changed.clear()  # no cycle is planned for these

    def load_of(self, worker: WorkerHeartbeat, now: float) -> Load:
        """Return the recent and pending work of a worker."""
        tokens_of = self.recent.runs_of(worker.id, now)
        return load_of(worker, self._tokens[worker.id], tokens_of)

    def deregister(self, worker: WorkerId) -> None:
        """Release the runs of a worker that is no longer registered."""
        lost = [queue for queue in self._runs.values() if queue.worker == worker]
        for queue in lost:
            self._remove(queue)
            self._add(replace(queue, worker=None, done_tokens=0), None)

    def reset(self, worker: WorkerId) -> None:
        """Start open passes anew: a new process of that worker id has no part of them."""
        self.put([
            replace(queue, done_tokens=0)
            for queue in self._runs.values()
            if queue.worker == worker and queue.done_tokens
        ])  # fmt: skip

    def waiting(self, worker: WorkerId) -> Waiting:
        """Return the runnable runs of a worker, for the planner."""
        return self._waiting[worker]

    def waiting_tokens(self, worker: WorkerId) -> int:
        """Return the number of tokens that wait for a worker."""
        return self._tokens[worker]

    def has_all(self, worker: WorkerId, runs: Iterable[RunId]) -> bool:
        """Return True if all of these runs wait for this worker."""
        return all(self._at.get(run) == worker for run in runs)

    def taken(self, ops: Iterable[QueuedOp], worker: WorkerId, now: float) -> None:
        """Remove the ops of a worker's planned step. Its runs go to the end of their tenants' turns."""
        self._waiting[worker].changed.clear()
        last: dict[RunId, int] = {}
        tokens: Counter[RunId] = Counter()
        for op in ops:  # those of one run are in order
            last[op.run] = op.seq
            tokens[op.run] += op.tokens
        for run, seq in last.items():
            queue = self._runs[run]
            if not queue.done_tokens:  # a pass that continues was counted when it started
                self.recent.note(run, worker, tokens[run], now)
            left = tuple(op for op in queue.ops if op.seq > seq)
            self._remove(queue)
            if left:
                self._add(replace(queue, worker=worker, ops=left, done_tokens=0), worker)
            if len(queue.ops) >= self._window_ops:
                self.unread.add(run)

    def _move(self, queues: Iterable[RunQueue], worker: WorkerId | None) -> None:
        for queue in queues:
            self._remove(queue)
            self._add(queue, worker)

    def _add(self, queue: RunQueue, worker: WorkerId | None) -> None:
        self._runs[queue.run] = queue
        self._at[queue.run] = worker
        self._waiting[worker].put(queue)
        self._tokens[worker] += tokens_of(queue)

    def _remove(self, queue: RunQueue) -> None:
        del self._runs[queue.run]
        worker = self._at.pop(queue.run)
        self._waiting[worker].remove(queue)
        self._tokens[worker] -= tokens_of(queue)


def tokens_of(queue: RunQueue) -> int:
    """Return the pending tokens of a run's ops in the window."""
    return sum(op.tokens for op in queue.ops) - queue.done_tokens
