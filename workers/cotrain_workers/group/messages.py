"""What the first member of a group asks of the others, and what they answer; as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.ops import Op


@dataclass(frozen=True)
class RunCycle:
    """Run these ops in lock-step with the others; answered with the cycle's output. May hold no op."""

    ops: Sequence[Op]
    allowances: Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class Restore:
    """Have a run's adapter in this state."""

    run: str
    state: AdapterState


@dataclass(frozen=True)
class Drop:
    """Forget a run's adapter."""

    run: str


@dataclass(frozen=True)
class CopyOut:
    """Give a run's state."""

    run: str


@dataclass(frozen=True)
class End:
    """The group ends in good order; not answered."""


Order = RunCycle | Restore | Drop | CopyOut | End


@dataclass(frozen=True)
class MemberFacts:
    """What one member holds."""

    runs: frozenset[str] = frozenset()
    open_passes: frozenset[tuple[str, int]] = frozenset()
    """By (run, seq)."""
    by_tier: Mapping[str, tuple[int, int]] | None = None
    """As `AdapterBank.by_tier`."""
    offloaded: int = 0
    over_budget: Sequence[str] = ()
    """As `AdapterBank.over_budget`."""
    memory_bytes: int = 0
    """Resident memory of its process."""

    @property
    def adapter_bytes(self) -> int:
        """Count the bytes of its adapters, wherever they are."""
        return sum(size for _, size in (self.by_tier or {}).values())


@dataclass(frozen=True)
class Answer:
    """What came of an order, and how the member is after it."""

    result: Any
    facts: MemberFacts
