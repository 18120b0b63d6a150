"""The members that follow, as the first one sees them: it asks, waits, and remembers how they were.

A member that follows: it does what the first one asks for, until that one ends.

What a member holds, read off its engine.
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
    """For the first member's main thread; `facts` and `lost` are for any."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.lost: str | None = None
        """Why this group cannot go on."""
        # To drop what no member has is harmless, and answered like anything else.
        self._facts: dict[int, MemberFacts] = {}
        self.ask_all(dict.fromkeys(links.others, Drop("")))

    @property
    def facts(self) -> list[MemberFacts]:
        """Return what each holds, as of its last answer."""
        return [self._facts[number] for number in self._links.others]

    def ask(self, member: int, order: Order) -> Any:
        """Have a member do something, and return what came of it.

        Raises:
            GroupLost: it is gone, or does not answer.
        """
        return self.ask_all({member: order})[member]

    def ask_all(self, orders: Mapping[int, Order]) -> dict[int, Any]:
        """Ask several at once. Raises GroupLost."""
        self.send(orders)
        return self.collect()

    def send(self, orders: Mapping[int, Order]) -> None:
        """Begin to ask; `collect` waits for the answers. Raises GroupLost."""
        self._refuse_if_lost()
        self._asked = tuple(orders)
        try:
            for member, order in orders.items():
                self._links.order(member, order)
        except RuntimeError as error:
            raise self.lose(error) from error

    def collect(self) -> dict[int, Any]:
        """Wait for the answers. Raises GroupLost."""
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
        """Let all members end, where they are still there."""
        try:
            self.send(dict.fromkeys(self._links.others, End()))
        except GroupLost as lost:
            log.warning("group_ended_without_its_members", reason=str(lost))

    def lose(self, error: BaseException) -> GroupLost:
        """Say that the group cannot go on: from here on nothing is asked any more."""
        self.lost = self.lost or f"{type(error).__name__}: {error}"
        return GroupLost(self.lost)

    def _refuse_if_lost(self) -> None:
        if self.lost:
            raise GroupLost(self.lost)


def facts_of(engine: Engine) -> MemberFacts:
    """Look, between cycles."""
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
    """Follow orders until the end. Whatever this raises, the group cannot go on."""
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
