"""Decides whose request is read next, when more come than can be answered. Pure: no socket, no clock.

A request costs some twenty times as much to answer as to receive. So what arrives is not parsed at once but round robin:
one request of each caller, then the next of each. A tenant that sends thousands waits behind itself alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from cotrain_store.messages.ids import TenantId

Waiting = TypeVar("Waiting")

#: Requests taken in one iteration of the event loop, of all callers. More of them make each longer, and a request takes many;
#: fewer cost throughput: what goes to Redis in one iteration goes there in one batch.
AT_ONCE = 16
#: A tenant that asked for nothing in so long, one clock period, is held up by no flood.
ACTIVE_S = 10.0


class Caller(NamedTuple):
    """With whose requests one is queued: those of its tenant, or of its address where no tenant is known."""

    tenant: TenantId | None
    address: str = ""
    asks_for_health: bool = False


class RequestQueue(Generic[Waiting]):
    """What waits, by caller. Each caller's own comes in the order in which it arrived.

    A round ends when all who still wait were served in it: what is left then are floods.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """Let `at_once` go at a time."""
        self._at_once = at_once
        self._unserved: OrderedDict[Caller, deque[Waiting]] = OrderedDict()  # who is next, first
        self._again: OrderedDict[Caller, deque[Waiting]] = OrderedDict()
        self._served: set[Caller] = set()  # in this round
        self._asked_at: OrderedDict[TenantId, float] = OrderedDict()  # who asked last, last

    def __bool__(self) -> bool:
        """Tell whether anything waits."""
        return bool(self._unserved or self._again)

    @property
    def is_round_over(self) -> bool:
        """Tell whether every caller that waits was served in this round."""
        return not self._unserved

    def wait(self, caller: Caller, waiting: Waiting, now: float) -> None:
        """Put it behind all that its caller has here."""
        queues = self._again if caller in self._served else self._unserved
        queues.setdefault(caller, deque()).append(waiting)
        if caller.tenant is not None:
            self._asked_at[caller.tenant] = now
            self._asked_at.move_to_end(caller.tenant)
        while self._asked_at and next(iter(self._asked_at.values())) < now - ACTIVE_S:
            self._asked_at.popitem(last=False)

    def take(self, *, only_unserved: bool = False) -> list[Waiting]:
        """Take the first of each caller, then more of each; or of those alone that were not served in this round."""
        taken: list[Waiting] = []
        while len(taken) < self._at_once:
            queues = self._unserved if self._unserved or only_unserved else self._again
            if not queues:
                break
            caller, own = queues.popitem(last=False)
            taken.append(own.popleft())
            self._served.add(caller)
            if own:
                self._again[caller] = own
        if not self:
            self._served.clear()
        return taken

    def begin_round(self) -> None:
        """Let those be served again that were, behind those that were not."""
        self._unserved.update(self._again)
        self._again.clear()
        self._served.clear()

    def holds_up_others(self, now: float) -> bool:
        """Tell whether a tenant works with this process that has nothing waiting."""
        waiting = {caller.tenant for caller in (*self._unserved, *self._again)}
        return any(
            now - at <= ACTIVE_S and tenant not in waiting for tenant, at in self._asked_at.items()
        )
