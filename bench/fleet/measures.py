"""Measures of a pool's schedule: waits, shares, turns. Pure; times in virtual seconds.

A *round* serves one quantum to every waiting tenant. The *fair turn* of a run is the number of rounds that its
tenant needs to serve each of its waiting runs, counted when the run begins to wait. Rounds are whole, since a tenant
is visited once per round. A run that a cycle passes over has been unseen for the cycle's share of rounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

#: Fair turns after which the remaining imbalance of each tenant changes Jain's index by less than 0.005.
LEAST_TURNS = 8


@dataclass
class Turns:
    """Waiting and served tenants and runs, cycle by cycle."""

    quantum_tokens: int
    longest_unseen: float = 0.0
    served: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    entitled: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _unseen: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Number of rounds that each waiting run has waited, and of its fair turn."""

    def note(self, heads: Mapping[str, Mapping[str, int]], tokens: Mapping[str, int], runs: Collection[str]) -> None:
        """Add a cycle.

        `heads` contains, by tenant, the cost of the first op of its runs that waited for this worker. `tokens`
        contains the served tokens by tenant, `runs` the served runs.
        """
        total = sum(tokens.values())
        rounds = total / (len(heads) * self.quantum_tokens)
        shares = equal_shares(total, {name: sum(costs.values()) for name, costs in heads.items()})
        for tenant, waiting in heads.items():
            self.entitled[tenant] += shares[tenant]
            turn = max(1, math.ceil(sum(waiting.values()) / self.quantum_tokens))
            for run in waiting:
                if run in runs:
                    self._unseen.pop(run, None)
                    continue
                unseen, its_turn = self._unseen.get(run, (0.0, turn))
                self._unseen[run] = unseen + rounds, its_turn
                self.longest_unseen = max(self.longest_unseen, (unseen + rounds) / its_turn)
        for tenant, count in tokens.items():
            self.served[tenant] += count

    def forget(self, runs: Iterable[str]) -> None:
        """Restart the waiting time of these runs."""
        for run in runs:
            self._unseen.pop(run, None)

    @property
    def farthest_off(self) -> float:
        """Largest distance of a tenant from its equal share, in quanta; it does not accumulate."""
        off = (abs(self.served[tenant] - due) for tenant, due in self.entitled.items())
        return max(off, default=0.0) / self.quantum_tokens

    def jain(self) -> float:
        """Return Jain's index of the served part of each tenant's equal share while it had work; 1 is equal.

        Passes are served whole, so a tenant is off by up to about a quantum at any moment. After few turns this is
        a large part of its tokens, so the index is meaningful only from LEAST_TURNS on.
        """
        shares = [self.served[tenant] / due for tenant, due in self.entitled.items()]
        return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def equal_shares(total: float, wanted: Mapping[str, float]) -> dict[str, float]:
    """Return equal shares of a total, at most the wanted amount each; the rest is divided among the others."""
    shares: dict[str, float] = {}
    for left, (name, wants) in zip(
        range(len(wanted), 0, -1), sorted(wanted.items(), key=lambda one: one[1]), strict=True
    ):
        shares[name] = min(wants, total / left)
        total -= shares[name]
    return shares
