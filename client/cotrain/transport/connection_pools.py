"""The connections to one server, in several small pools.

A pool of httpx looks at each of its connections whenever a request comes or ends, which for a hundred
requests in flight costs more than all else this client does. Small pools keep that from growing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

AT_ONCE = 4
"""Requests in flight in one pool, and so its connections, before the next pool is used."""
POOLS = 250
"""More than AT_ONCE times so many requests share the pools evenly."""


@dataclass
class _Pool:
    http: httpx.AsyncClient
    in_flight: int = 0


class ConnectionPools:
    """Sends each request through the first pool that is not full. Lives on the client's own loop."""

    def __init__(self, make_pool: Callable[[], httpx.AsyncClient]) -> None:
        self._make_pool = make_pool
        self._pools = [_Pool(make_pool())]

    @property
    def first(self) -> httpx.AsyncClient:
        """The pool that is always there, to build requests with."""
        return self._pools[0].http

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read its answer. Raises what httpx raises."""
        pool = self._free_pool()
        pool.in_flight += 1
        try:
            return await pool.http.send(request)
        finally:
            pool.in_flight -= 1

    async def close(self) -> None:
        """Close every connection."""
        for pool in self._pools:
            await pool.http.aclose()

    def _free_pool(self) -> _Pool:
        for pool in self._pools:
            if pool.in_flight < AT_ONCE:
                return pool
        if len(self._pools) == POOLS:
            return min(self._pools, key=lambda pool: pool.in_flight)
        self._pools.append(_Pool(self._make_pool()))
        return self._pools[-1]
