"""Pool in virtual time: clients and workers are events, the scheduler and everything in Redis are real.

Time passes only between events, for any duration of the scheduler's work; that work is measured separately.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.fleet.clients import KINDS, Loop, Request
from bench.fleet.measures import Turns, waits
from bench.fleet.scheduler import Scheduler
from bench.fleet.worker import RateWorker
from bench.support.timing import percentile
from cotrain_scheduler.planner import QUANTUM_TOKENS
from cotrain_store.disk.spool import Spool
from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId, WorkerId, run_id
from cotrain_store.messages.ops import OpKind, Step
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord
from cotrain_store.oplog import intake
from cotrain_store.oplog.intake import Intake
from cotrain_store.oplog.submission import TenantLimits
from cotrain_store.redis_client.connection import open_batching_connection, open_sync_connection
from cotrain_store.settings.scheduler import SchedulerSettings
from tests.support.limits import always

POOL = PoolRecord(
    id=PoolId("p-fleet"), base_model="null", architecture="null", vocab_size=512, context_length=1024,
    max_rank=64, num_parameters=1, device="none", dtype="float32", numerics_id="null",
    tokens_per_s=1e9,
)  # fmt: skip
RUNS_OF_A_TENANT = 10
#: Token rate of a worker; a cycle of 10 s has about 20 passes and as many optim_steps, for any number of runs.
TOKENS_PER_S = 2_000.0
PERIOD_S = 10.0
#: Events within this time are simultaneous; a scheduler gathers for longer.
AT_ONCE_S = 0.002
_BEAT_S = 3.0
_SENT_AT_ONCE = 256


@dataclass(frozen=True)
class Shape:
    """Parameters of one trial: runs, fair turns and disturbances."""

    runs: int
    turns: float
    idle_worker: bool = False
    scheduler_killed: bool = False
    deaths_every_s: float = 600.0
    max_s: float = 600.0
    """Limit of real time in s."""
    seed: int = 0


@dataclass
class Run:
    """One run: its loop, its accepted ops that are not planned, and its worker."""

    record: RunRecord
    loop: Loop
    next_seq: int = 0
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    """Cost in tokens and time of acceptance of each op."""
    worker: str = ""


class _HostTime:
    """Replacement of the module `time` for the intake of requests, in virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def time(self) -> float:
        return self._world.now


class World:
    """Simulation of one shape."""

    def __init__(self, shape: Shape, redis_url: str, redis_pid: int, spool: Spool) -> None:
        self._shape = shape
        self._draw = random.Random(shape.seed)
        self._url = redis_url
        self._spool = spool
        self._connection = open_batching_connection(redis_url)
        self._sync = open_sync_connection(redis_url)
        limits = always(TenantLimits(ops=100_000, record_bytes=10**12))
        self._intake = Intake(self._connection, spool, limits)
        self._events: list[tuple[float, int, Callable[[], Coroutine[Any, Any, None]]]] = []
        self._number = itertools.count()
        self.now = 1_000_000.0
        intake.time = _HostTime(self)  # type: ignore[assignment,attr-defined]  # virtual time for the intake, too
        self._runs = {run.record.id: run for run in map(self._run, range(shape.runs))}
        self._heads: dict[str, dict[str, int]] = defaultdict(dict)
        self._workers = {"w0": self._worker("w0")}
        self._schedulers = itertools.count()
        self._scheduler = self._new_scheduler(redis_pid)
        self._redis_pid = redis_pid
        self._turns = Turns(QUANTUM_TOKENS)
        self._waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._sent: list[tuple[Run, Request]] = []
        self._planned = self._cycles = self._deaths = 0
        self._goal = 0.0
        self._served = 0.0
        self._beaten = 0.0

    async def play(self) -> dict[str, Any]:
        """Run until the fair turns are complete or the real time is used up; return the measures."""
        began = time.monotonic()
        self._workers["w0"].enter(self.now)
        await self._make_runs()
        # The second worker joins when every run has its worker, so that it only gets runs that are moved.
        if self._shape.idle_worker:
            self._workers["w1"] = self._worker("w1")
        self._scheduler.forget_costs()
        first = self.now
        tenants = len(self._runs) / RUNS_OF_A_TENANT
        self._goal = self._shape.turns * tenants * QUANTUM_TOKENS
        self._later(self._draw.expovariate(1 / self._shape.deaths_every_s), self._kill_a_worker)
        if self._shape.idle_worker:
            self._workers["w1"].enter(self.now)
        was_killed = False
        tick_at = self.now
        while self._served < self._goal and time.monotonic() - began < self._shape.max_s:
            tick_at = await self._advance(tick_at)
            if self._shape.scheduler_killed and not was_killed and self._served > self._goal / 2:
                was_killed = True
                await self._scheduler.let_lease_run_out()
                self._scheduler = self._new_scheduler(self._redis_pid, self._scheduler)
                tick_at = self.now
        for worker in self._workers.values():
            worker.count(self.now)
        found = self._report(self.now - first, time.monotonic() - began)
        await self._scheduler.close()
        await self._connection.aclose()
        self._sync.close()
        return found

    def _report(self, virtual_s: float, real_s: float) -> dict[str, Any]:
        costs = self._scheduler.costs
        return {
            "runs": len(self._runs), "tenants": len(self._runs) // RUNS_OF_A_TENANT,
            "idle_worker": self._shape.idle_worker, "scheduler_killed": self._shape.scheduler_killed,
            "ops_planned": self._planned, "cycles": self._cycles, "deaths": self._deaths,
            "virtual_s": virtual_s, "real_s": real_s, "turns": self._served / self._goal * self._shape.turns,
            "ticks": costs.ticks,
            "scheduler_ms_per_op": 1e3 * costs.scheduler_s / max(1, self._planned),
            "redis_ms_per_op": 1e3 * costs.redis_s / max(1, self._planned),
            "planning_ms_per_op": 1e3 * costs.planning_s / max(1, self._planned),
            "tick_p99_ms": 1e3 * percentile(costs.tick_s, 0.99),
            "waits_s": waits(self._waits),
            "jain": self._turns.jain(), "farthest_off_quanta": self._turns.farthest_off,
            "longest_unseen_turns": self._turns.longest_unseen,
            "idle_share": {
                name: 1 - worker.busy_s / max(1e-9, worker.alive_s)
                for name, worker in self._workers.items()
            },
        }  # fmt: skip

    # Events.

    async def _advance(self, tick_at: float) -> float:
        """Process the next instant; return the time of the scheduler's next tick without a wake-up."""
        self.now = max(self.now, min(tick_at, self._events[0][0]))
        woken = False
        while self._events and self._events[0][0] <= self.now + AT_ONCE_S:
            await heapq.heappop(self._events)[2]()
        for run in await self._send():
            woken = woken or self._scheduler.is_woken_by(run.worker)
        if time.monotonic() - self._beaten > _BEAT_S:
            self._beat()
        if not (woken or self._scheduler.was_freed or self.now >= tick_at):
            return tick_at
        again = await self._scheduler.tick(self.now)
        for worker in self._workers.values():
            self._begin(worker)
            self._hand_over(worker)
        return again

    def _begin(self, worker: RateWorker) -> None:
        lasts_s = worker.take()
        if lasts_s is None:
            return
        step = worker.at_work
        assert step
        if step.planned_at == self.now:
            self._note_cycle(worker.id, step)

        async def end() -> None:
            if (
                worker.at_work is step
            ):  # otherwise its process has crashed, and another one runs the step
                worker.commit(lasts_s)
                self._hand_over(worker)
                self._scheduler.was_freed = True
                self._resolve(step)
                self._begin(worker)

        self._later(lasts_s, end)

    def _hand_over(self, worker: RateWorker) -> None:
        """Hand over runs that are moved; their waiting time restarts, as they are the last of their tenant there."""
        if self._shape.idle_worker:  # otherwise there is no other worker
            self._turns.forget(worker.hand_over())

    def _note_cycle(self, worker: str, step: Step) -> None:
        """Count waiting and served runs, and waits, of a step that was planned just now."""
        self._scheduler.note_planned()
        heads: dict[str, dict[str, int]] = defaultdict(dict)
        served = {op.run for op in step.ops}
        for run in self._runs.values():
            waits = run.record.id in served or self._scheduler.worker_of(run.record.id) == worker
            if run.waiting and waits:
                heads[run.record.tenant][run.record.id] = run.waiting[0][0]
        tokens: dict[str, int] = defaultdict(int)
        for op in step.ops:
            run = self._runs[op.run]
            cost, accepted_at = run.waiting.popleft()
            tokens[run.record.tenant] += cost
            self._waits[run.loop.kind].append(self.now - accepted_at)
            run.worker = worker
        self._turns.note(heads, tokens, served)
        self._planned += len(step.ops)
        self._cycles += 1
        self._served += sum(tokens.values())

    def _resolve(self, step: Step) -> None:
        """Return results to clients, which continue after a short pause."""
        for op in step.ops:
            self._runs[op.run].loop.in_flight -= 1
        for name in {op.run for op in step.ops}:
            run = self._runs[name]
            self._later(run.loop.thinks_s(), partial(self._go_on, run))

    async def _go_on(self, run: Run) -> None:
        self._ask(run, run.loop.sends())

    async def _kill_a_worker(self) -> None:
        """Crash a worker and restart it later, sometimes only after its runs have been moved."""
        alive = [worker for worker in self._workers.values() if worker.is_alive]
        if alive:
            worker = self._draw.choice(alive)
            worker.die(self.now)
            self._deaths += 1
            self._later(self._draw.uniform(5.0, 60.0), lambda: self._come_back(worker))
        self._later(self._draw.expovariate(1 / self._shape.deaths_every_s), self._kill_a_worker)

    async def _come_back(self, worker: RateWorker) -> None:
        worker.enter(self.now)
        self._begin(worker)

    def _ask(self, run: Run, requests: list[Request]) -> None:
        run.loop.in_flight += len(requests)
        self._sent += [(run, request) for request in requests]

    async def _send(self) -> list[Run]:
        """Submit the requests that clients have sent, in order for each run."""
        sent, self._sent = self._sent, []
        by_run: dict[str, list[Request]] = defaultdict(list)
        for run, request in sent:
            by_run[run.record.id].append(request)
        names = list(by_run)
        for first in range(0, len(names), _SENT_AT_ONCE):
            at_once = names[first : first + _SENT_AT_ONCE]
            await asyncio.gather(*(self._submit(self._runs[RunId(n)], by_run[n]) for n in at_once))
        return [self._runs[RunId(name)] for name in names]

    async def _submit(self, run: Run, requests: list[Request]) -> None:
        for request in requests:
            seq, run.next_seq = run.next_seq, run.next_seq + 1
            if request.kind is OpKind.CREATE:
                await self._intake.create_run(run.record)
            else:
                await self._intake.submit(
                    run.record, seq, request.kind, b"body", request.tokens, digest=str(seq)
                )
            run.waiting.append((max(1, request.tokens), self.now))

    # Setup.

    async def _make_runs(self) -> None:
        """Accept and create every run, and schedule its first requests; not counted."""
        for run in self._runs.values():
            self._ask(run, [Request(OpKind.CREATE, 0)])
        await self._send()
        while any(run.waiting for run in self._runs.values()):
            await self._scheduler.tick(self.now)
            worker = self._workers["w0"]
            if worker.take() is not None:
                assert worker.at_work
                for op in worker.at_work.ops:
                    run = self._runs[op.run]
                    run.waiting.popleft()
                    run.worker, run.loop.in_flight = worker.id, 0
                worker.commit(0.0)
            self._beat()
            self.now += 1.0
        for run in self._runs.values():
            self._later(self._draw.uniform(0.0, PERIOD_S), partial(self._go_on, run))

    def _run(self, number: int) -> Run:
        tenant = number // RUNS_OF_A_TENANT
        session = SessionId(f"session-{tenant}")
        record = RunRecord(
            run_id(session, number), TenantId(f"tenant-{tenant}"), session, POOL.id, "null",
            LoraSpec(rank=1, seed=0), time.time(),
        )  # fmt: skip
        return Run(record, Loop(KINDS[tenant % len(KINDS)], random.Random(number)))

    def _worker(self, name: str) -> RateWorker:
        draw = random.Random(f"{self._shape.seed} {name}")
        return RateWorker(self._sync, self._spool, POOL, WorkerId(name), TOKENS_PER_S, draw)

    def _new_scheduler(self, redis_pid: int, before: Scheduler | None = None) -> Scheduler:
        """Return a scheduler that takes over from a killed one, whose lease has expired."""
        name = f"scheduler-{next(self._schedulers)}"
        settings = SchedulerSettings(
            redis_url=self._url, data_dir=Path("/nowhere"), clock_period_s=PERIOD_S
        )
        return Scheduler(name, settings, POOL.id, redis_pid, before)

    def _later(self, after_s: float, event: Callable[[], Coroutine[Any, Any, None]]) -> None:
        heapq.heappush(self._events, (self.now + after_s, next(self._number), event))

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        for worker in self._workers.values():
            if worker.is_alive:
                worker.beat()
