"""Pool in virtual time: clients and workers are events, the scheduler and everything in Redis are real.

Time passes only between events, for any duration of the scheduler's work; that work is measured separately.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.fleet.measures import Turns
from bench.support.timing import percentile
from cotrain_scheduler.planner import QUANTUM_TOKENS
from cotrain_scheduler.pool_scheduler import PoolScheduler
from cotrain_scheduler.scheduler import RENEW_S
from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId, WorkerId, run_id
from cotrain_store.messages.ops import OpKind, Result, Step, Wake
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord
from cotrain_store.oplog import intake
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.intake import Intake
from cotrain_store.redis_client.connection import open_batching_connection, open_connection, open_sync_connection
from cotrain_store.settings import SchedulerSettings
from cotrain_store.tenants.quotas import Quotas
from tests.support.limits import always

POOL = PoolRecord(
    id=PoolId("p-fleet"), base_model="null", architecture="null", vocab_size=512, context_length=1024,
    max_rank=64, num_parameters=1, device="none", dtype="float32", numerics_id="null", tokens_per_s=1e9,
)  # fmt: skip
RUNS_OF_A_TENANT = 10
#: Token rate of a worker; a cycle of 10 s has about 20 passes and as many optim_steps, for any number of runs.
TOKENS_PER_S = 2_000.0
PERIOD_S = 10.0
#: Standard deviation of the logarithm of a step's duration.
NOISE = 0.2
#: Steps that a run has in flight. A naive one sends each request after the result of the last, a burst waits for all
#: of its results.
KINDS = {"naive": 1, "submit-both": 1, "pipelined": 2, "burst": 8}
#: Range of the time from a result to the next request, in s.
THINKS_S = dict.fromkeys(KINDS, (0.001, 0.02)) | {"burst": (0.1, 2.0)}
#: Range of the tokens of a forward_backward; an optim_step has none.
TOKENS = (200, 1_800)
#: Events within this time are simultaneous; a scheduler gathers for longer.
AT_ONCE_S = 0.002
#: Limit of the real time of one trial.
MAX_S = 600.0
_BEAT_S = 3.0
_SENT_AT_ONCE = 256
_DONE = Result.of_json({"type": "done"})


@dataclass(frozen=True)
class Shape:
    """Parameters of one trial: runs, fair turns and disturbances."""

    runs: int
    turns: float
    idle_worker: bool = False
    scheduler_killed: bool = False


@dataclass
class Costs:
    """Processor time in s."""

    scheduler_s: float = 0.0
    redis_s: float = 0.0
    planning_s: float = 0.0  # of both processes in ticks that planned something
    tick_s: list[float] = field(default_factory=list)


@dataclass
class Run:
    """One run: its loop, and its accepted ops that are not planned."""

    record: RunRecord
    kind: str
    draw: random.Random
    next_seq: int = 1
    in_flight: int = 0
    waiting: deque[tuple[int, float]] = field(default_factory=deque)  # cost, time of acceptance
    worker: str = ""

    def requests(self) -> list[tuple[OpKind, int]]:
        """Return kind and tokens of the requests to send now; none while the loop waits for results."""
        step = [(OpKind.FORWARD_BACKWARD, self.draw.randint(*TOKENS)), (OpKind.OPTIM_STEP, 0)]
        if self.kind in ("naive", "burst") and self.in_flight:
            return []
        if self.kind == "naive":
            return [step[1 - self.next_seq % 2]]
        return step * (KINDS[self.kind] - math.ceil(self.in_flight / 2))


class RateWorker:
    """Worker with a fixed token rate that commits one small result per op."""

    def __init__(self, execution: Execution, name: str) -> None:
        self.execution, self.name, self.busy_s = execution, name, 0.0
        self.at_work: Step | None = None
        self._draw = random.Random(f"0 {name}")
        execution.claim()
        execution.publish(POOL)
        self.beat()

    def beat(self) -> None:
        """Send a heartbeat; its key expires in real time."""
        epoch = self.execution.epoch
        beat = WorkerHeartbeat(WorkerId(self.name), epoch, "serving", "none", TOKENS_PER_S, 0, 0, 0)
        self.execution.heartbeat(beat)

    def take(self) -> float:
        """Start the open step; return its duration in s, 0 if there is none."""
        if self.at_work or not (steps := self.execution.open_steps()):
            return 0.0
        self.at_work = steps[0]
        tokens = sum(max(1, op.tokens) for op in self.at_work.ops)
        return tokens / TOKENS_PER_S * self._draw.lognormvariate(0.0, NOISE)

    def commit(self, lasted_s: float) -> Step:
        step, self.at_work = self.at_work, None
        assert step
        results = {op.id: _DONE for op in step.ops}
        self.execution.commit(step, results, {"cycle": step.cycle, "worker": self.name}, {})
        self.busy_s += lasted_s
        return step

    def hand_over(self) -> list[RunId]:
        """Hand runs with pending moves over to the other worker, without a copy; return their ids."""
        if self.at_work:
            return []
        epoch, moves = self.execution.epoch, self.execution.moves
        return [m.run for m in moves.wanted() if moves.hand_over(m, epoch, in_memory=False)]


async def played(shape: Shape, redis_url: str, redis_pid: int, spool: Spool) -> dict[str, Any]:
    return await World(shape, redis_url, redis_pid, spool).play()


class World:
    """Simulation of one shape."""

    def __init__(self, shape: Shape, redis_url: str, redis_pid: int, spool: Spool) -> None:
        self.now = 1_000_000.0
        self._shape, self._url, self._spool = shape, redis_url, spool
        self._redis_stat = Path(f"/proc/{redis_pid}/schedstat")
        self._connection = open_batching_connection(redis_url)
        self._sync = open_sync_connection(redis_url)
        limits = always(Quotas(ops=100_000, record_bytes=10**12))
        self._intake = Intake(self._connection, spool, limits)
        intake.time = SimpleNamespace(time=lambda: self.now)  # type: ignore[assignment,attr-defined]  # virtual time
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._runs = {run.record.id: run for run in map(_run, range(shape.runs))}
        self._workers: list[RateWorker] = []
        self._turns = Turns(QUANTUM_TOKENS)
        self._waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._sent: list[Run] = []
        self._planned = self._cycles = self._served = 0
        self._beaten = self._last_s = self._led_at = 0.0
        self._costs = Costs()
        self._was_freed = True
        self._new_scheduler("first")

    async def play(self) -> dict[str, Any]:
        """Run until the fair turns are complete or the real time is used up; return the measures."""
        shape, began = self._shape, time.monotonic()
        self._add_worker("w0")
        await self._make_runs()
        if shape.idle_worker:  # each run has its worker now, so that this one only gets runs that are moved
            self._add_worker("w1")
        self._costs, first, tick_at = Costs(), self.now, self.now
        goal = shape.turns * len(self._runs) / RUNS_OF_A_TENANT * QUANTUM_TOKENS
        kill_at = goal / 2 if shape.scheduler_killed else math.inf
        while self._served < goal and time.monotonic() - began < MAX_S:
            tick_at = await self._advance(tick_at)
            if self._served > kill_at:  # the killed one leaves nothing, and its lease expires
                kill_at, tick_at = math.inf, self.now
                await self._scheduler.delete(redis_keys.scheduler_lease())
                await self._scheduler.aclose()
                self._new_scheduler("second")
        await self._scheduler.aclose()
        await self._connection.aclose()
        self._sync.close()
        return self._report(self.now - first, self._served / goal * shape.turns)

    def _report(self, virtual_s: float, turns: float) -> dict[str, Any]:
        costs, ops = self._costs, max(1, self._planned)
        return {
            "runs": len(self._runs), "idle_worker": self._shape.idle_worker, "scheduler_killed": self._shape.scheduler_killed,
            "ops_planned": self._planned, "cycles": self._cycles, "virtual_s": virtual_s, "turns": turns,
            "scheduler_ms_per_op": 1e3 * costs.scheduler_s / ops, "redis_ms_per_op": 1e3 * costs.redis_s / ops,
            "planning_ms_per_op": 1e3 * costs.planning_s / ops, "tick_p99_ms": 1e3 * percentile(costs.tick_s, 0.99),
            "waits_s": {
                kind: {"p50": percentile(found, 0.5), "p99": percentile(found, 0.99)}
                for kind, found in self._waits.items()
            },
            "jain": self._turns.jain(), "farthest_off_quanta": self._turns.farthest_off,
            "longest_unseen_turns": self._turns.longest_unseen,
            "idle_share": {each.name: 1 - each.busy_s / max(1e-9, virtual_s) for each in self._workers},
        }  # fmt: skip

    async def _advance(self, tick_at: float) -> float:
        """Process the next instant; return the time of the scheduler's next tick without a wake-up."""
        self.now = max(self.now, min([tick_at, *(at for at, *_ in self._events[:1])]))
        while self._events and self._events[0][0] <= self.now + AT_ONCE_S:
            heapq.heappop(self._events)[2]()
        woken = False
        for run in await self._send():
            worker = WorkerId(run.worker) if run.worker else None
            woken = woken or self._clock.is_woken_by(Wake(POOL.id, worker, False))
        if time.monotonic() - self._beaten > _BEAT_S:
            self._beat()
        if not (woken or self._was_freed or self.now >= tick_at):
            return tick_at
        again = await self._tick()
        for each in self._workers:
            self._begin(each)
            self._hand_over(each)
        return again

    async def _tick(self) -> float:
        """Tick like a woken scheduler, and add its cost; return the time of its next tick without a wake-up."""
        self._was_freed = False
        before, redis_before = time.process_time(), self._redis_s()
        if self.now - self._led_at > RENEW_S:
            await self._dispatch.lead()
            await self._dispatch.pass_time()
            self._led_at = self.now
        again = await self._clock.tick(self.now)
        took_s, redis_s = time.process_time() - before, self._redis_s() - redis_before
        self._costs.scheduler_s += took_s
        self._costs.redis_s += redis_s
        self._costs.tick_s.append(took_s)
        self._last_s = took_s + redis_s
        return again

    def _redis_s(self) -> float:
        """Return the processor time of Redis' main thread in s, with a resolution of 1 ns."""
        return int(self._redis_stat.read_text().split()[0]) / 1e9

    def _begin(self, worker: RateWorker) -> None:
        lasts_s = worker.take()
        step = worker.at_work
        if not lasts_s or not step:
            return
        if step.planned_at == self.now:
            self._note_cycle(worker.name, step)

        def end() -> None:
            worker.commit(lasts_s)
            self._hand_over(worker)
            self._was_freed = True
            for op in step.ops:
                self._runs[op.run].in_flight -= 1
            for name in {op.run for op in step.ops}:
                run = self._runs[name]
                self._later(run.draw.uniform(*THINKS_S[run.kind]), partial(self._sent.append, run))
            self._begin(worker)

        self._later(lasts_s, end)

    def _hand_over(self, worker: RateWorker) -> None:
        """Hand over runs that are moved; their waiting time restarts, as they are the last of their tenant there."""
        if self._shape.idle_worker:  # otherwise there is no other worker
            self._turns.forget(worker.hand_over())

    def _note_cycle(self, worker: str, step: Step) -> None:
        """Count waiting and served runs, and waits, of a step that was planned just now."""
        self._costs.planning_s += self._last_s
        self._last_s = 0.0
        heads: dict[str, dict[str, int]] = defaultdict(dict)
        served = {op.run for op in step.ops}
        for run in self._runs.values():
            name = run.record.id
            if run.waiting and (name in served or self._clock._queue._at.get(name) == worker):
                heads[run.record.tenant][name] = run.waiting[0][0]
        tokens: dict[str, int] = defaultdict(int)
        for op in step.ops:
            run = self._runs[op.run]
            cost, accepted_at = run.waiting.popleft()
            tokens[run.record.tenant] += cost
            self._waits[run.kind].append(self.now - accepted_at)
            run.worker = worker
        self._turns.note(heads, tokens, served)
        self._planned += len(step.ops)
        self._cycles += 1
        self._served += sum(tokens.values())

    async def _send(self) -> list[Run]:
        """Submit the requests of the runs whose clients have thought, in order for each run."""
        sent = [*{run.record.id: run for run in self._sent}.values()]
        self._sent.clear()
        for first in range(0, len(sent), _SENT_AT_ONCE):
            await asyncio.gather(*map(self._submit, sent[first : first + _SENT_AT_ONCE]))
        return sent

    async def _submit(self, run: Run) -> None:
        for kind, tokens in run.requests():
            seq, run.next_seq = run.next_seq, run.next_seq + 1
            run.in_flight += 1
            await self._intake.submit(run.record, seq, kind, b"body", tokens, digest=str(seq))
            run.waiting.append((max(1, tokens), self.now))

    async def _make_runs(self) -> None:
        """Create every run, and schedule its first requests; not counted."""
        runs, (worker,) = [*self._runs.values()], self._workers
        for first in range(0, len(runs), _SENT_AT_ONCE):
            some = runs[first : first + _SENT_AT_ONCE]
            await asyncio.gather(*(self._intake.create_run(run.record) for run in some))
        created = 0
        while created < len(runs):
            await self._tick()
            if worker.take():
                step = worker.commit(0.0)
                created += len(step.ops)
                for op in step.ops:
                    self._runs[op.run].worker = worker.name
            self._beat()
            self.now += 1.0
        draw = random.Random(0)
        for run in runs:
            self._later(draw.uniform(0.0, PERIOD_S), partial(self._sent.append, run))

    def _add_worker(self, name: str) -> None:
        execution = Execution(self._sync, self._spool, self._spool, POOL.id, WorkerId(name))
        self._workers.append(RateWorker(execution, name))

    def _new_scheduler(self, name: str) -> None:
        self._scheduler = open_connection(self._url)
        self._dispatch = Dispatch(self._scheduler, name)
        settings = SchedulerSettings(redis_url=self._url, data_dir=Path("/nowhere"), clock_period_s=PERIOD_S)
        self._clock = PoolScheduler(self._dispatch, settings, POOL.id)
        self._led_at = 0.0

    def _later(self, after_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + after_s, next(self._number), event))

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        for worker in self._workers:
            worker.beat()


def _run(number: int) -> Run:
    tenant = number // RUNS_OF_A_TENANT
    session = SessionId(f"session-{tenant}")
    record = RunRecord(
        run_id(session, number), TenantId(f"tenant-{tenant}"), session, POOL.id, "null",
        LoraSpec(rank=1, seed=0), time.time(),
    )  # fmt: skip
    return Run(record, [*KINDS][tenant % len(KINDS)], random.Random(number))
