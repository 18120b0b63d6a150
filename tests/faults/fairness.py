"""Invariant I9: tenants with pending work receive equal turns, by tokens (`planner.py`), whatever
crashes.

The check uses only external data: the acceptance times of clients and the cycle records. It looks
at the cycles in a row in which a run was passed over, although it had a request that could have run
in each. In these cycles the run received at most two quanta and two requests less than any other
run. One request is a possible lead from before the first of these cycles, because a worker runs
whole slices and exceeds its tokens. The other request is a possible lead at the end. A restart of
the scheduler begins a new round, and so does a cycle with a single run. Each worker gives turns to
its own runs. Here every run has its own tenant.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.messages.ids import PoolId
from cotrain_store.redis_client.connection import SyncConnection

#: Routes that run last in a cycle; only saves and loads follow them.
SAVES_AND_LOADS = (
    "save_weights", "save_weights_external", "save_weights_for_sampler", "load_weights",
)  # fmt: skip
LAST = ("optim_step", *SAVES_AND_LOADS)


@dataclass(frozen=True)
class Accepted:
    """A request that a client received an acceptance for, at its position in its run."""

    at_s: float
    route: str
    tokens: int

    @property
    def cost(self) -> int:
        """Return the cost of its turn: the tokens of a pass, at least 1.

        Other requests are free.
        """
        return 0 if self.route in LAST else max(1, self.tokens)


@dataclass(frozen=True)
class Cycle:
    """Time and worker of a planned cycle, and its requests of each run."""

    planned_at: float
    served: Mapping[str, int]
    """Requests completed in it, by run."""
    worker: str = "w0"
    ran: Mapping[str, int] = field(default_factory=dict)
    """Tokens that ran in it, by run, including those of incomplete passes.

    Without a record, those of its completed requests.
    """


@dataclass(frozen=True)
class Turns:
    """Violations of fairness, and the number of times that a run was passed over."""

    violations: Sequence[str]
    passed_over: int


def cycles_of(store: SyncConnection, pool: PoolId) -> list[Cycle]:
    """Read the cycle records of a pool, oldest first."""
    records: list[dict[str, Any]] = [json.loads(record) for record in store.lrange(redis_keys.cycles(pool), 0, -1)]
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
    """Check the turns of all runs; `accepted` is by run and by position in it."""
    violations: list[str] = []
    passed_over = 0
    begun: Counter[str] = Counter()  # by run: number of completed requests
    largest: Counter[str] = Counter()  # by run: tokens of the largest completed request
    windows: dict[str, _Window] = {}
    workers = {cycle.worker for cycle in cycles}
    # The worker of a run is the one that served it; before that it is known only if there is a
    # single worker.
    worker_by_run = dict.fromkeys(accepted, *workers) if len(workers) == 1 else {}
    for cycle in cycles:
        worker_by_run.update(dict.fromkeys(cycle.served, cycle.worker))
        served = {run: [accepted[run][begun[run] + n] for n in range(count)] for run, count in cycle.served.items()}
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
            window.note(served, cycle.ran, {each: accepted[each].get(begun[each]) for each in served})
            window.rounds += served.keys() == {run}
            rounds = window.rounds + sum(window.since_s <= at_s <= cycle.planned_at for at_s in restarted_s)
            violations += window.unfair(run, ahead, rounds, quantum_tokens)
    return Turns(violations, passed_over)


def _could_have_run(head: Accepted, before: Sequence[Accepted], planned_at: float) -> bool:
    """Return True if a request could have joined the earlier requests of its run in a cycle."""
    is_held_back = before and before[-1].route in LAST and head.route not in SAVES_AND_LOADS
    return head.at_s < planned_at and not is_held_back


class _Window:
    """Consecutive cycles in which one run waited, and the tokens that each run received in them."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.rounds = 1
        self._tokens: Counter[str] = Counter()
        self._largest: defaultdict[str, int] = defaultdict(int)

    def note(
        self, served: Mapping[str, Sequence[Accepted]], ran: Mapping[str, int], next_: Mapping[str, Accepted | None]
    ) -> None:
        """Add a cycle: its completed requests, and the tokens that ran, including those of
        incomplete requests."""
        for run, requests in served.items():
            costs = [request.cost for request in requests]
            open_, over = next_[run], sum(request.tokens for request in requests)
            if open_ and ran.get(run, over) > over:
                costs.append(open_.cost)  # incomplete, and its first slice ran
            # Requests without tokens count as well (`Accepted.cost`).
            without = sum(request.cost for request in requests if not request.tokens)
            self._tokens[run] += ran[run] + without if run in ran else sum(costs)
            self._largest[run] = max([self._largest[run], *costs])

    def unfair(self, waiting: str, ahead: int, rounds: int, quantum: int) -> Iterable[str]:
        """Yield each run that received too much while another one waited."""
        for run, tokens in self._tokens.items():
            most = self._tokens[waiting] + rounds * (2 * quantum + self._largest[run] + ahead)
            if run != waiting and tokens > most:
                yield f"I9 {run} was served {tokens} tokens, and at most {most} were its turn beside {waiting}"
