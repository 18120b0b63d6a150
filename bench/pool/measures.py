"""What a fleet's schedule came to: waits, shares, turns. Pure; times in virtual seconds.

A *round* is what is served until every waiting tenant had its quantum. The *fair turn* of a run, from when
it begins to wait, is as many rounds as its tenant needs to get to each run that waits then: whole ones,
since a tenant is visited once in a round. A run that is passed over in a cycle was not looked at for
the cycle's share of that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: Fair turns after which what each tenant is off at the end moves Jain's index by less than 0.005.
LEAST_TURNS = 8


@dataclass
class Turns:
    """Who waited while whom was served, cycle by cycle."""

    quantum_tokens: int
    longest_unseen: float = 0.0
    served: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    entitled: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _unseen: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of each run that waits: for how many rounds, and how many are its fair turn."""

    def note(
        self,
        heads: Mapping[str, Mapping[str, int]],
        tokens: Mapping[str, int],
        runs: Collection[str],
    ) -> None:
        """Add a cycle: by tenant, what the heads of its runs that waited for this worker cost; by tenant,
        the tokens that were served; the runs that were served.
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
        """Count anew how long these wait."""
        for run in runs:
            self._unseen.pop(run, None)

    @property
    def farthest_off(self) -> float:
        """By how many quanta the tenant farthest from its equal share is ahead of it or behind; it does not add up."""
        off = (abs(self.served[tenant] - due) for tenant, due in self.entitled.items())
        return max(off, default=0.0) / self.quantum_tokens

    def jain(self) -> float:
        """Jain's index over what each tenant was served of its equal share while it had work; 1 is equal.

        Passes are served whole, so that at any moment a tenant is up to a quantum or so off, which after few
        turns is a large part of all it was served: the index says something from LEAST_TURNS on.
        """
        shares = [self.served[tenant] / due for tenant, due in self.entitled.items()]
        return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def equal_shares(total: float, wanted: Mapping[str, float]) -> dict[str, float]:
    """Divide what there is equally, no one getting more than wanted: what that leaves, the others divide."""
    shares: dict[str, float] = {}
    for left, (name, wants) in zip(
        range(len(wanted), 0, -1), sorted(wanted.items(), key=lambda one: one[1]), strict=True
    ):
        shares[name] = min(wants, total / left)
        total -= shares[name]
    return shares


def waits(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """By kind of tenant, how long a request waited from being accepted to its cycle, in s."""
    return {
        kind: {f"p{share}": percentile(found, share / 100) for share in (50, 99)}
        for kind, found in times.items()
    }


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which this share of all lies; 0 of none."""
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))] if found else 0.0
