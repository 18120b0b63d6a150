"""Orders from the first member of a group to the others, the followers.

An order is a function of a follower's engine and lock step, with its other arguments. Its answer is the result and the
state of the follower after it. The order None ends the follower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog

from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.device import resident_bytes
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import CycleOutput, Op
from cotrain_workers.group.links import GroupLost, Links
from cotrain_workers.group.lock_step import GroupLockStep

log = structlog.get_logger()

Order: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...]]"


@dataclass(frozen=True)
class MemberFacts:
    """State of one member."""

    runs: frozenset[str] = frozenset()
    open_passes: frozenset[tuple[str, int]] = frozenset()  # ids of open passes, as (run, seq)
    by_tier: Mapping[str, tuple[int, int]] | None = None  # same format as `AdapterBank.by_tier`
    offloaded: int = 0
    runs_to_evict: Sequence[str] = ()  # same format as `AdapterBank.runs_to_evict`
    memory_bytes: int = 0  # resident memory of the member's process in bytes

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the member's adapters in all tiers."""
        return sum(size for _, size in (self.by_tier or {}).values())


class Followers:
    """Followers of a group. For the first member's main thread; any thread may read `facts` and `lost`.

    It is the first member's side. It sends orders, awaits the answers and keeps the state of
    each follower. The function `follow` is the loop of a follower, which executes orders until
    the first member ends. The function `facts_of` returns the state of a member.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.lost: str | None = None  # reason why this group cannot continue
        self._facts: dict[int, MemberFacts] = {}
        self.send(dict.fromkeys(links.others, (do_nothing, ())))  # any answer contains the facts
        self.collect()

    @property
    def facts(self) -> list[MemberFacts]:
        """State of each follower, as of its last answer."""
        return [self._facts[number] for number in self._links.others]

    def call(self, member: int, method: Callable[..., Any], *args: object) -> Any:
        """Return the result of a function of the adapter bank of one member.

        Raises:
            GroupLost: the member has ended or does not answer.
        """
        self.send({member: (call_bank, (method, *args))})
        return self.collect()[member]

    def send(self, orders: Mapping[int, Order | None]) -> None:
        """Send orders without a wait; `collect` waits for the answers. Raises GroupLost."""
        self._refuse_if_lost()
        self._asked = tuple(orders)
        try:
            for member, order in orders.items():
                self._links.order(member, order)
        except RuntimeError as error:
            raise self.lose(error) from error

    def collect(self) -> dict[int, Any]:
        """Wait for the answers and return the results. Raises GroupLost."""
        self._refuse_if_lost()
        results = {}
        try:
            for member in self._asked:
                results[member], self._facts[member] = self._links.await_answer(member)
        except RuntimeError as error:
            raise self.lose(error) from error
        return results

    def end(self) -> None:
        """Order all members to end; log a warning if the group is already lost."""
        try:
            self.send(dict.fromkeys(self._links.others))
        except GroupLost as lost:
            log.warning("group_ended_without_its_members", reason=str(lost))

    def lose(self, error: BaseException) -> GroupLost:
        """Return the error for a failed group. From now on every order raises it."""
        self.lost = self.lost or f"{type(error).__name__}: {error}"
        return GroupLost(self.lost)

    def _refuse_if_lost(self) -> None:
        if self.lost:
            raise GroupLost(self.lost)


def facts_of(engine: Engine) -> MemberFacts:
    """Return the state of a member; valid between cycles."""
    adapters = engine.adapters
    return MemberFacts(
        runs=adapters.runs,
        open_passes=engine.open_passes.ids,
        by_tier=adapters.by_tier,
        offloaded=adapters.offloaded,
        runs_to_evict=adapters.runs_to_evict(),
        memory_bytes=resident_bytes(),
    )


def follow(engine: Engine, lock_step: GroupLockStep) -> None:
    """Execute orders until the order to end. After any exception the group cannot continue."""
    links = lock_step.links
    while order := links.await_order():
        function, args = order
        links.answer((function(engine, lock_step, *args), facts_of(engine)))


def do_nothing(engine: Engine, lock_step: GroupLockStep) -> None:
    """Do nothing: the answer reports the state of the follower."""


def call_bank(engine: Engine, _: GroupLockStep, method: Callable[..., Any], *args: object) -> Any:
    """Return the result of a function of this member's adapter bank."""
    return method(engine.adapters, *args)


def run_cycle(
    engine: Engine, lock_step: GroupLockStep, ops: Sequence[Op], allowances: Mapping[tuple[str, int], int]
) -> CycleOutput:
    """Run ops in lock step with the other members and return their output. `ops` may be empty."""
    return run_to_end(lock_step.run(engine, ops, allowances, None))
