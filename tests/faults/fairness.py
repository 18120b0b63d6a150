"""Invariant I9: tenants with work get equal turns, by tokens (`planner.py`), whatever dies.

Seen from outside: clients note when what was accepted, cycle records say who was served. Whoever was
passed over in a number of cycles in a row, with a request waiting that could have run in each, was served
at most two quanta and two requests less than any other run in these cycles: one that it may have been ahead by
when they began (a worker runs whole slices, and does not take the tokens to the letter), and one that the other
is ahead by now. A scheduler that starts again begins a new round, and so does a run that is alone for a cycle.
Each worker gives turns to its own runs. Here every run is a tenant of its own.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotrain_store.keys import fleet_keys
from cotrain_store.messages.ids import PoolId
from cotrain_store.redis_client.connection import SyncConnection

#: What runs last in a cycle; behind it only saves and loads do.
SAVES_AND_LOADS = (
    "save_weights", "save_weights_external", "save_weights_for_sampler", "load_weights",
)  # fmt: skip
LAST = ("optim_step", *SAVES_AND_LOADS)


@dataclass(frozen=True)
class Accepted:
    """A request that a client knows to be accepted, at its place in its run."""

    at_s: float
    route: str
    tokens: int

    @property
    def cost(self) -> int:
        """Count what it takes of a turn: a pass its tokens, at least 1; anything else waits for none."""
        return 0 if self.route in LAST else max(1, self.tokens)


@dataclass(frozen=True)
class Cycle:
    """When a cycle was planned, for which worker, and what of each run it held."""

    planned_at: float
    served: Mapping[str, int]
    """Requests that were over in it."""
    worker: str = "w0"
    ran: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each run that ran in it, those of passes that were not over in it, too; else its requests'."""


@dataclass(frozen=True)
class Turns:
    """What was unfair, and how often a run was passed over at all."""

    violations: Sequence[str]
    passed_over: int


def cycles_of(store: SyncConnection, pool: PoolId) -> list[Cycle]:
    """Read the cycle records of a pool, the oldest first."""
    records: list[dict[str, Any]] = [
        json.loads(record) for record in store.lrange(fleet_keys.cycles(pool), 0, -1)
    ]
    return [
        Cycle(
            record["planned_at"],
            {row["run"]: sum(row["ops"].values()) for row in record["runs"]},
            record["worker"],
            {row["run"]: row["tokens"] for row in record["runs"]},
        )
        for record in sorted(records, key=lambda record: int(record["cycle"]))
    ]


def turns(
    cycles: Sequence[Cycle],
    accepted: Mapping[str, Mapping[int, Accepted]],
    quantum_tokens: int,
    restarted_s: Sequence[float] = (),
) -> Turns:
    """Look at who waited while whom was served; `accepted` is by run and place in it."""
    violations: list[str] = []
    passed_over = 0
    begun: Counter[str] = Counter()  # by run: its requests that were served
    largest: Counter[str] = Counter()  # by run: the tokens of the largest of them
    windows: dict[str, _Window] = {}
    workers = {cycle.worker for cycle in cycles}
    # Where a run waits is known by who served it; before that only if there is no other worker.
    worker_by_run = dict.fromkeys(accepted, *workers) if len(workers) == 1 else {}
    for cycle in cycles:
        worker_by_run.update(dict.fromkeys(cycle.served, cycle.worker))
        served = {
            run: [accepted[run][begun[run] + n] for n in range(count)]
            for run, count in cycle.served.items()
        }
        begun.update(cycle.served)
        for run, requests in served.items():
            largest[run] = max([largest[run], *(request.cost for request in requests)])
        for run, asked in accepted.items():
            if worker_by_run.get(run) != cycle.worker:
                continue
            head = asked.get(begun[run])
            if not head or not _could_have_run(head, served.get(run, []), cycle.planned_at):
                windows.pop(run, None)
                continue
            passed_over += 1
            ahead = max(largest[run], head.cost)
            window = windows.setdefault(run, _Window(cycle.planned_at))
            window.note(
                served, cycle.ran, {each: accepted[each].get(begun[each]) for each in served}
            )
            window.rounds += served.keys() == {run}
            rounds = window.rounds + sum(
                window.since_s <= at_s <= cycle.planned_at for at_s in restarted_s
            )
            violations += window.unfair(run, ahead, rounds, quantum_tokens)
    return Turns(violations, passed_over)


def _could_have_run(head: Accepted, before: Sequence[Accepted], planned_at: float) -> bool:
    """Tell whether a request could have joined those of its run before it in a cycle."""
    is_held_back = before and before[-1].route in LAST and head.route not in SAVES_AND_LOADS
    return head.at_s < planned_at and not is_held_back


class _Window:
    """Cycles in a row in which one run waited, and what each run was served in them."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.rounds = 1
        self._tokens: Counter[str] = Counter()
        self._largest: defaultdict[str, int] = defaultdict(int)

    def note(
        self,
        served: Mapping[str, Sequence[Accepted]],
        ran: Mapping[str, int],
        next_: Mapping[str, Accepted | None],
    ) -> None:
        """Add a cycle: requests that were over in it, and the tokens that ran, of which some may be of the one behind them."""
        for run, requests in served.items():
            costs = [request.cost for request in requests]
            open_, over = next_[run], sum(request.tokens for request in requests)
            if open_ and ran.get(run, over) > over:
                costs.append(open_.cost)  # it is not over, and its first slice ran
            # What has no tokens takes a turn as well (`Accepted.cost`).
            without = sum(request.cost for request in requests if not request.tokens)
            self._tokens[run] += ran[run] + without if run in ran else sum(costs)
            self._largest[run] = max([self._largest[run], *costs])

    def unfair(self, waiting: str, ahead: int, rounds: int, quantum: int) -> Iterable[str]:
        """Name each run that got too much while another waited."""
        for run, tokens in self._tokens.items():
            most = self._tokens[waiting] + rounds * (2 * quantum + self._largest[run] + ahead)
            if run != waiting and tokens > most:
                yield f"I9 {run} was served {tokens} tokens, and at most {most} were its turn beside {waiting}"
