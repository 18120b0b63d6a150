"""Orders from the first member of a group to the others, the followers.

`Followers` is the first member's side. It sends orders, awaits the answers and keeps the state of each follower.
The function `follow` is the loop of a follower, which executes orders until the first member ends. The function
`facts_of` returns the state of a member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from cotrain_workers.engine.cycle import run_to_end
from cotrain_workers.engine.device import resident_bytes
from cotrain_workers.engine.engine import Engine
from cotrain_workers.group.links import GroupLost, Links
from cotrain_workers.group.lock_step import GroupLockStep
from cotrain_workers.group.messages import (
    Answer,
    CopyOut,
    Drop,
    End,
    MemberFacts,
    Order,
    Restore,
    RunCycle,
)

log = structlog.get_logger()


class Followers:
    """Followers of a group. For the first member's main thread; any thread may read `facts` and `lost`."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.lost: str | None = None
        """Reason why this group cannot continue."""
        # The answer to any order contains the facts. To drop an unknown run is harmless.
        self._facts: dict[int, MemberFacts] = {}
        self.ask_all(dict.fromkeys(links.others, Drop("")))

    @property
    def facts(self) -> list[MemberFacts]:
        """State of each follower, as of its last answer."""
        return [self._facts[number] for number in self._links.others]

    def ask(self, member: int, order: Order) -> Any:
        """Send an order to one member and return the result.

        Raises:
            GroupLost: the member has ended or does not answer.
        """
        return self.ask_all({member: order})[member]

    def ask_all(self, orders: Mapping[int, Order]) -> dict[int, Any]:
        """Send orders to several members at once and return the results. Raises GroupLost."""
        self.send(orders)
        return self.collect()

    def send(self, orders: Mapping[int, Order]) -> None:
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
                answer = self._links.await_answer(member)
                self._facts[member] = answer.facts
                results[member] = answer.result
        except RuntimeError as error:
            raise self.lose(error) from error
        return results

    def end(self) -> None:
        """Order all members to end; log a warning if the group is already lost."""
        try:
            self.send(dict.fromkeys(self._links.others, End()))
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
        over_budget=adapters.over_budget(),
        memory_bytes=resident_bytes(),
    )


def follow(engine: Engine, links: Links, lock_step: GroupLockStep) -> None:
    """Execute orders until `End`. After any exception the group cannot continue."""
    while not isinstance(order := links.await_order(), End):
        links.answer(Answer(_done(order, engine, lock_step), facts_of(engine)))


def _done(order: Order, engine: Engine, lock_step: GroupLockStep) -> Any:
    match order:
        case RunCycle(ops, allowances):
            return run_to_end(lock_step.run(engine, ops, allowances, None))
        case Restore(run, state):
            engine.adapters.restore(run, state)
        case Drop(run):
            engine.adapters.drop(run)
        case CopyOut(run):
            return engine.adapters.state(run)
        case End():
            raise AssertionError("It ends the loop.")
    return None
