"""Messages between the first member of a group and its followers, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.ops import Op


@dataclass(frozen=True)
class RunCycle:
    """Order to run ops in lock step with the other members. The answer is the cycle's output. `ops` may be empty."""

    ops: Sequence[Op]
    allowances: Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class Restore:
    """Order to set the state of a run's adapter."""

    run: str
    state: AdapterState


@dataclass(frozen=True)
class Drop:
    """Order to drop a run's adapter."""

    run: str


@dataclass(frozen=True)
class CopyOut:
    """Order to return a run's state."""

    run: str


@dataclass(frozen=True)
class End:
    """Order to end, without an answer."""


Order = RunCycle | Restore | Drop | CopyOut | End


@dataclass(frozen=True)
class MemberFacts:
    """State of one member."""

    runs: frozenset[str] = frozenset()
    open_passes: frozenset[tuple[str, int]] = frozenset()
    """Ids of open passes, as (run, seq)."""
    by_tier: Mapping[str, tuple[int, int]] | None = None
    """Same format as `AdapterBank.by_tier`."""
    offloaded: int = 0
    over_budget: Sequence[str] = ()
    """Same format as `AdapterBank.over_budget`."""
    memory_bytes: int = 0
    """Resident memory of the member's process in bytes."""

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the member's adapters in all tiers."""
        return sum(size for _, size in (self.by_tier or {}).values())


@dataclass(frozen=True)
class Answer:
    """Result of an order, and the state of the member after it."""

    result: Any
    facts: MemberFacts
