"""Store in memory for a pool's clock: queues of whole ops, workers, and planned steps."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from cotrain_scheduler.planner import GATHER_S
from cotrain_scheduler.pool_scheduler import PoolScheduler
from cotrain_store.errors import PlanOutdated
from cotrain_store.messages.fleet import Pauses, PlanPolicy, Scaling, WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, PoolView, QueuedOp, RunQueue, Step, Wake
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.monitoring.fleet import PoolStatus
from cotrain_store.settings import SchedulerSettings

POOL, WORKER = PoolId("pool"), WorkerId("w0")
NOW = 1_000_000.0
TOKENS_PER_S = 1e4


class InMemory:
    """Store as a clock sees it: queues of whole ops, one worker, and the steps planned for it."""

    def __init__(self) -> None:
        self.leads = True
        self.paused = PlanPolicy()
        self.queued: defaultdict[str, list[QueuedOp]] = defaultdict(list)
        self.steps: list[Step] = []
        self.open: list[Step] = []
        self.outdated = 0
        self.gaps_of: list[tuple[RunId, TenantId]] = []
        self.expired: list[RunId] = []
        self.resigned = False
        self.workers = [WORKER]
        self.accepts_saves = True
        self.dead: list[WorkerId] = []
        self.reassigned: list[tuple[WorkerId, WorkerId]] = []
        self.calls = self.passed = 0
        self.read_all: list[int] = []
        self.read_runs: list[str] = []
        self.epoch = 0
        self.number = 0
        self.changed: dict[RunId, int] = {}
        self.scaling: Scaling | None = None
        self.wake: asyncio.Queue[Wake | None] = asyncio.Queue()

    def submit(
        self, run: str, kind: OpKind = OpKind.FORWARD_BACKWARD, *, is_noted: bool = True, at: float = NOW
    ) -> None:
        seq = sum(op.run == run for step in self.steps for op in step.ops) + len(self.queued[run])
        self.queued[run].append(QueuedOp(RunId(run), seq, kind, 10, "inline", 1, at))
        if is_noted:
            self.note(run)

    def note(self, run: str) -> None:
        self.number += 1
        self.changed.pop(RunId(run), None)
        self.changed[RunId(run)] = self.number

    def finish(self) -> None:
        self.open.clear()

    async def lead(self) -> bool:
        self.epoch = self.epoch or 1
        return self.leads

    async def pass_time(self) -> None:
        self.passed += 1

    async def resign(self) -> None:
        self.resigned = True

    async def policy(self) -> PlanPolicy:
        return self.paused

    async def base_model(self, pool: PoolId) -> str:
        return f"model of {pool}"

    async def pools(self) -> list[PoolId]:
        return [POOL]

    @property
    def slots(self) -> list[WorkerSlot]:
        room = self.accepts_saves
        beats = [
            WorkerHeartbeat(w, 1, "serving", "cpu", TOKENS_PER_S, 0, 0, NOW, accepts_saves=room) for w in self.workers
        ]
        opened = Counter(step.worker for step in self.open)
        return [WorkerSlot(beat.id, 1, beat, opened[beat.id]) for beat in beats] + [
            WorkerSlot(w, 1, None) for w in self.dead
        ]

    async def reassign(self, _: PoolId, dead: WorkerSlot, successor: WorkerId) -> bool:
        self.dead.remove(dead.worker)
        self.reassigned.append((dead.worker, successor))
        return True

    async def status(self, _: PoolId) -> PoolStatus:
        ready_runs = sum(map(bool, self.queued.values()))
        return PoolStatus(
            PoolRecord(POOL, "m", "", 0, 0, 0, 0, "cpu", "float32", "", TOKENS_PER_S),
            ready_runs=ready_runs,
            scaling=self.scaling,
        )

    async def paused_runs(self, _: PoolId, __: Pauses) -> int:
        return 0

    async def write_scaling(self, _: PoolId, scaling: Scaling) -> None:
        self.scaling = scaling

    def queue(self, run: RunId) -> RunQueue:
        return RunQueue(run, TenantId(run[0]), None, tuple(self.queued[run]))

    async def ready(self, _: PoolId) -> list[RunQueue]:
        self.calls += 1
        self.read_all.append(len(self.steps))
        return [self.queue(RunId(run)) for run, ops in list(self.queued.items()) if ops]

    async def view(self, _: PoolId, since: int | None = None, runs: Sequence[RunId] = ()) -> PoolView:
        """Return two changes at a time, so that a clock must call again for all of them."""
        changed = [] if since is None else self.changed.items()
        found = [run for run, number in changed if number > (since or 0)][:2]
        is_complete = len(found) < 2
        number = self.number if is_complete else self.changed[found[-1]]
        ready = sum(bool(ops) for ops in self.queued.values())
        self.read_runs += runs
        queues = [self.queue(run) for run in (*runs, *found)]
        return PoolView(number, queues, is_complete, ready, len(self.steps), self.slots, [])

    async def plan(self, _: PoolId, step: Step, __: int = 0) -> None:
        if self.outdated or any(op not in self.queued[op.run] for op in step.ops):
            self.outdated = max(0, self.outdated - 1)
            raise PlanOutdated
        for op in step.ops:
            self.queued[op.run].remove(op)
        self.steps.append(step)
        self.open.append(step)

    async def old_gaps(self, _: PoolId, __: float) -> list[tuple[RunId, TenantId]]:
        return self.gaps_of

    async def expire_gap(self, _: PoolId, run: RunId, __: TenantId) -> None:
        self.expired.append(run)

    async def wakes(self) -> AsyncIterator[Wake | None]:
        while True:
            yield await self.wake.get()


def settings_of(**settings: Any) -> SchedulerSettings:
    given = {"redis_url": "redis://", "data_dir": Path("/nowhere"), **settings}
    return SchedulerSettings.model_validate(given)


def pool_on(store: Any, *, gather_s: float = GATHER_S, **settings: Any) -> PoolScheduler:
    return PoolScheduler(store, settings_of(**settings), POOL, gather_s=gather_s)


def wake(worker: str | None = None, *, is_free: bool = False) -> Wake:
    return Wake(POOL, WorkerId(worker) if worker else None, is_free)
