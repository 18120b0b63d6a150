"""Decides which connections a process keeps. Pure: no socket, no clock.

A connection on which nothing is asked costs its client nothing and this process a descriptor: where there
are too many, the one that has waited longest makes way. One on which a request is being answered never does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from enum import Enum, StrEnum, auto
from ipaddress import IPv6Address, ip_address
from typing import Generic, NamedTuple, TypeVar

#: Connections over the limit on which health checks are answered, and nothing else.
HEALTH_CONNECTIONS = 64

Connection = TypeVar("Connection", bound="Hashable")


class Admission(Enum):
    """What may be asked on a connection."""

    ALL = auto()
    HEALTH_ONLY = auto()
    NOTHING = auto()
    """It is to be closed."""


class Limit(StrEnum):
    """Whose number of connections is limited."""

    PROCESS = "process"
    ADDRESS = "address"


class Added(NamedTuple, Generic[Connection]):
    """What becomes of a new connection."""

    admission: Admission
    victim: Connection | None = None
    """Another one, which is to be closed for it."""
    reached: Limit | None = None
    """The limit at which either was refused, or may be asked for health alone."""


class ConnectionTable(Generic[Connection]):
    """The connections of one process."""

    def __init__(
        self,
        most: int,
        max_of_address: int,
        is_shared: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Hold `most` connections; of one address `most_of_address`, unless many clients share it."""
        self._most = most
        self._max_of_address = max_of_address
        self._is_shared = is_shared
        self._address: dict[Connection, str] = {}
        self._surplus: set[Connection] = set()
        self._count_by_address: Counter[str] = Counter()
        # Oldest first.
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_by_address: defaultdict[str, OrderedDict[Connection, None]] = defaultdict(
            OrderedDict
        )

    def __len__(self) -> int:
        """Count all of them."""
        return len(self._address)

    def add(self, connection: Connection, address: str) -> Added[Connection]:
        """Take in a new one."""
        owner = subnet_of(address)
        victim, reached = None, None
        if self._count_by_address[owner] >= self._max_of_address and not self._is_shared(address):
            victim, reached = next(iter(self._waiting_by_address[owner]), None), Limit.ADDRESS
            if victim is None:
                return Added(Admission.NOTHING, reached=reached)
        elif len(self._address) - len(self._surplus) >= self._most:
            victim, reached = self._waiting_member(), Limit.PROCESS
            if victim is None:
                return self._add_surplus(connection, owner)
        if victim is not None:
            self.remove(victim)
        self._insert(connection, owner)
        return Added(Admission.ALL, victim, reached)

    def asks(self, connection: Connection) -> None:
        """Note that a request is there to answer on it."""
        self._waiting.pop(connection, None)
        owner = self._address.get(connection, "")
        if owner in self._waiting_by_address:
            self._waiting_by_address[owner].pop(connection, None)
            if not self._waiting_by_address[owner]:
                del self._waiting_by_address[owner]

    def waits(self, connection: Connection) -> None:
        """Note that all that was asked on it is answered."""
        owner = self._address.get(connection)
        if owner is not None and connection not in self._waiting:
            self._waiting[connection] = self._waiting_by_address[owner][connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget one that is closed. Twice is harmless."""
        self.asks(connection)
        self._surplus.discard(connection)
        owner = self._address.pop(connection, None)
        if owner is not None:
            self._count_by_address[owner] -= 1
            if not self._count_by_address[owner]:
                del self._count_by_address[owner]

    def _add_surplus(self, connection: Connection, owner: str) -> Added[Connection]:
        victim = None
        if len(self._surplus) >= HEALTH_CONNECTIONS:
            victim = next((each for each in self._waiting if each in self._surplus), None)
            if victim is None:
                return Added(Admission.NOTHING, reached=Limit.PROCESS)
            self.remove(victim)
        self._insert(connection, owner)
        self._surplus.add(connection)
        return Added(Admission.HEALTH_ONLY, victim, Limit.PROCESS)

    def _waiting_member(self) -> Connection | None:
        # There are few others: no more than HEALTH_CONNECTIONS are looked at in vain.
        return next((each for each in self._waiting if each not in self._surplus), None)

    def _insert(self, connection: Connection, owner: str) -> None:
        self._address[connection] = owner
        self._count_by_address[owner] += 1
        self.waits(connection)


def subnet_of(address: str) -> str:
    """Give an address of IPv4, or the network of one of IPv6: its owner has all of the others in it."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address) or parsed.ipv4_mapped:
        return address
    return parsed.exploded[:19]  # /64
