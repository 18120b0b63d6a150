"""Cost of one long pass for its neighbours: the planner, and a worker on a simulated clock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from cotrain_scheduler.planner import select
from cotrain_scheduler.queue import FairQueue
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue
from tests.support.planning import waiting_of

TOKENS_PER_S = 3_800.0
"""Run time of a pass of LONG tokens at this rate: 37 s."""
LONG = 140_000
PERIOD_S = 10.0
SLICE = 512
"""Minimum tokens that the worker runs of a pass."""


@dataclass
class Answer:
    """Times at which a request was sent and its step ended, in seconds."""

    sent: float
    answered: float = 0.0
    cycle: int = 0

    @property
    def waited_s(self) -> float:
        return self.answered - self.sent


class Pool:
    """One worker at a constant speed. An eager cycle begins when the previous one has ended."""

    def __init__(self, guessed: float = TOKENS_PER_S) -> None:
        self.now, self.cycle, self.guessed = 0.0, 0, guessed
        self.queues: dict[str, RunQueue] = {}
        self.fair_queue = FairQueue()
        self.answers: defaultdict[str, list[Answer]] = defaultdict(list)

    def send(self, run: str, kind: OpKind, tokens: int = 0) -> Answer:
        self.answers[run].append(Answer(self.now))
        seq = len(self.answers[run]) - 1
        sent = QueuedOp(RunId(run), seq, kind, tokens, "inline", 1, self.now)
        tenant = TenantId(run.partition("/")[0])
        before = self.queues.get(run, RunQueue(RunId(run), tenant, WorkerId("w0"), ()))
        self.queues[run] = replace(before, ops=(*before.ops, sent))
        return self.answers[run][-1]

    def step(self) -> float:
        """Plan and run one cycle. Return its duration in seconds."""
        waiting = [queue for queue in self.queues.values() if queue.ops]
        everyone = waiting_of(waiting, self.fair_queue)
        selection = select(everyone, self.fair_queue, int(self.guessed * PERIOD_S))
        self.fair_queue, self.cycle = selection.fair_queue, self.cycle + 1
        took_s, ended = 0.0, []
        for queue in waiting:
            for op in [op for op in selection.ops if op.run == queue.run]:
                begun = self.queues[queue.run].done_tokens
                left = op.tokens - begun
                allowed = selection.allowances.get(op.request_id, left)
                if op.request_id in selection.allowances:  # a slice, or the rest of the period
                    in_time = int((PERIOD_S - took_s) * TOKENS_PER_S)
                    allowed = max(min(allowed, in_time), min(SLICE, left))
                took_s += allowed / TOKENS_PER_S
                if allowed < left:
                    self.queues[queue.run] = replace(self.queues[queue.run], done_tokens=begun + allowed)
                    break
                rest = self.queues[queue.run].ops[1:]
                self.queues[queue.run] = replace(queue, ops=rest, done_tokens=0)
                ended.append(self.answers[op.run][op.seq])
        self.now += took_s
        for answer in ended:
            answer.answered, answer.cycle = self.now, self.cycle
        return took_s


def test_a_cycle_is_bounded_and_a_newcomer_runs_in_the_next_one() -> None:
    pool = Pool()
    for number in range(20):
        pool.send(f"t{number}/long", OpKind.FORWARD_BACKWARD, LONG)
    for number in range(60):
        began = pool.now
        newcomers = [
            pool.send(f"new{number}/a", OpKind.CREATE),
            pool.send(f"new{number}/b", OpKind.FORWARD_BACKWARD, 3),
            pool.send(f"t0/{number}", OpKind.OPTIM_STEP),
            pool.send(f"t1/{number}", OpKind.SAVE),
        ]
        assert pool.step() <= PERIOD_S + SLICE / TOKENS_PER_S
        assert {answer.answered for answer in newcomers} == {pool.now}
        assert pool.now > began


def test_three_tokens_next_to_an_earlier_long_pass_wait_for_one_period() -> None:
    pool = Pool()
    long = pool.send("a", OpKind.FORWARD_BACKWARD, LONG)
    pool.step()  # It has the whole pool, and is stopped after a period.
    newcomer = pool.send("b", OpKind.FORWARD_BACKWARD, 3)
    sent_while_it_ran = PERIOD_S
    pool.step()
    assert newcomer.waited_s + sent_while_it_ran <= 2 * PERIOD_S
    while not long.answered:
        pool.step()
    assert long.waited_s < LONG / TOKENS_PER_S + 1  # the neighbour took three tokens of its time


def test_long_passes_share_equally_without_losing_time() -> None:
    pool = Pool()
    answers = [pool.send(f"t{number}", OpKind.FORWARD_BACKWARD, LONG) for number in range(20)]
    while any(not answer.answered for answer in answers):
        pool.step()
    assert abs(pool.now - 20 * LONG / TOKENS_PER_S) < 1
    first = min(answer.answered for answer in answers)
    assert pool.now - first <= 20 * 2 * 2_048 / TOKENS_PER_S + PERIOD_S


def loop(pool: Pool, style: str, tokens: int, steps: int = 5) -> float:
    """Run a training loop of one tenant to its end. Return the cycles per step."""
    passes, last = [], []
    together = style != "naive"
    for number in range(steps):
        passes.append(pool.send("a", OpKind.FORWARD_BACKWARD, tokens))
        if together:
            last.append(pool.send("a", OpKind.OPTIM_STEP))
        if style == "pipelined" and number < steps - 1:
            continue
        while not passes[-1].answered:
            pool.step()
        if not together:
            last.append(pool.send("a", OpKind.OPTIM_STEP))
        while not last[-1].answered:
            pool.step()
    return pool.cycle / steps


def test_the_loop_of_a_single_tenant_takes_its_cycles_at_any_rate_estimate() -> None:
    for guessed in (TOKENS_PER_S, TOKENS_PER_S / 50):  # after start-up, and before a measurement
        for tokens in (3, 20_000, 37_000):
            assert loop(Pool(guessed), "naive", tokens) == 2.0
            assert loop(Pool(guessed), "submit both", tokens) == 1.0
            assert loop(Pool(guessed), "pipelined", tokens) == 1.0


def test_a_step_longer_than_a_period_takes_as_many_cycles_as_periods() -> None:
    assert loop(Pool(), "submit both", LONG) == 4.0


def test_a_pass_and_its_step_sent_together_share_a_cycle_under_load() -> None:
    pool = Pool()
    for _ in range(5):
        sent = [
            (pool.send(f"t{n}", OpKind.FORWARD_BACKWARD, 1_900), pool.send(f"t{n}", OpKind.OPTIM_STEP))
            for n in range(20)
        ]
        pool.step()
        assert all(passed.cycle == stepped.cycle == pool.cycle for passed, stepped in sent)
