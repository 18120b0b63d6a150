"""A member that follows: it does what the first one asks for, until that one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_workers.engine.cycle import run_to_end
from cotrain_workers.group.facts import facts_of
from cotrain_workers.group.messages import Answer, CopyOut, Drop, End, Restore, RunCycle

if TYPE_CHECKING:
    from cotrain_workers.engine.engine import Engine
    from cotrain_workers.group.links import Links
    from cotrain_workers.group.lock_step import GroupLockStep
    from cotrain_workers.group.messages import Order


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
