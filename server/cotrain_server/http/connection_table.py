"""Admission of connections to a process. Pure: no socket, no clock.

An idle connection costs its client nothing, and this process a descriptor. If there are too many,
the connection that has been idle longest is closed. A connection with a request in progress is
never closed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from enum import Enum, StrEnum, auto
from ipaddress import IPv6Address, ip_address
from typing import Generic, NamedTuple, TypeVar

#: Connections above the limit on which only health checks are answered.
HEALTH_CONNECTIONS = 64

Connection = TypeVar("Connection", bound="Hashable")


class Admission(Enum):
    """Kinds of requests that are answered on a connection."""

    ALL = auto()
    HEALTH_ONLY = auto()
    NOTHING = auto()
    """The connection must be closed."""


class Limit(StrEnum):
    """Subject of a limit on connections."""

    PROCESS = "process"
    ADDRESS = "address"


class Added(NamedTuple, Generic[Connection]):
    """Decision about a new connection."""

    admission: Admission
    victim: Connection | None = None
    """Another connection that must be closed to make room."""
    reached: Limit | None = None
    """The limit that caused the refusal, the restriction to health checks, or the victim."""


class ConnectionTable(Generic[Connection]):
    """Connections of one process."""

    def __init__(
        self,
        most: int,
        max_of_address: int,
        is_shared: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Create a table for `most` connections, with at most `max_of_address` from each unshared
        address.
        """
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
        """Return the number of connections."""
        return len(self._address)

    def add(self, connection: Connection, address: str) -> Added[Connection]:
        """Add a new connection, and return the decision about it."""
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
        """Mark a connection as active: it has a request to answer."""
        self._waiting.pop(connection, None)
        owner = self._address.get(connection, "")
        if owner in self._waiting_by_address:
            self._waiting_by_address[owner].pop(connection, None)
            if not self._waiting_by_address[owner]:
                del self._waiting_by_address[owner]

    def waits(self, connection: Connection) -> None:
        """Mark a connection as idle: all its requests are answered."""
        owner = self._address.get(connection)
        if owner is not None and connection not in self._waiting:
            self._waiting[connection] = self._waiting_by_address[owner][connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection. Idempotent."""
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
        # At most HEALTH_CONNECTIONS entries are skipped.
        return next((each for each in self._waiting if each not in self._surplus), None)

    def _insert(self, connection: Connection, owner: str) -> None:
        self._address[connection] = owner
        self._count_by_address[owner] += 1
        self.waits(connection)


def subnet_of(address: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address, because one client owns all of
    it.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address) or parsed.ipv4_mapped:
        return address
    return parsed.exploded[:19]  # /64
