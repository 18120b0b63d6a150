from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from cotrain.transport import connection_pools as module
from cotrain.transport.connection_pools import AT_ONCE, ConnectionPools
from tests.support.waiting import until


class Server:
    """Answers when a test says so, and knows which pool each request came through."""

    def __init__(self) -> None:
        self.made = 0
        self.through: Counter[int] = Counter()
        self.may_answer = asyncio.Event()

    def pool(self) -> httpx.AsyncClient:
        number = self.made
        self.made += 1

        async def answer(_: httpx.Request) -> httpx.Response:
            self.through[number] += 1
            await self.may_answer.wait()
            return httpx.Response(200)

        return httpx.AsyncClient(
            base_url="http://server", transport=httpx.MockTransport(answer), trust_env=False
        )


async def send(pools: ConnectionPools, server: Server, count: int) -> None:
    """Send so many requests at once, and have them answered when all have come."""
    server.may_answer.clear()
    came = server.through.total() + count
    request = pools.first.build_request("GET", "/")
    sent = [asyncio.create_task(pools.send(request)) for _ in range(count)]
    await until(lambda: server.through.total() >= came)
    server.may_answer.set()
    await asyncio.gather(*sent)


async def test_no_pool_holds_more_than_is_cheap() -> None:
    server = Server()
    pools = ConnectionPools(server.pool)
    await send(pools, server, 2 * AT_ONCE + 1)
    assert server.through == {0: AT_ONCE, 1: AT_ONCE, 2: 1}
    await pools.close()


async def test_few_requests_need_one_pool_however_many_came_before() -> None:
    server = Server()
    pools = ConnectionPools(server.pool)
    await send(pools, server, 3 * AT_ONCE)
    server.through.clear()
    for _ in range(3):
        await send(pools, server, AT_ONCE)
    assert server.through == {0: 3 * AT_ONCE}
    assert server.made == 3
    await pools.close()


async def test_more_than_all_pools_are_meant_for_is_shared_evenly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "POOLS", 2)
    server = Server()
    pools = ConnectionPools(server.pool)
    await send(pools, server, 4 * AT_ONCE)
    assert server.through == {0: 2 * AT_ONCE, 1: 2 * AT_ONCE}
    await pools.close()


async def test_a_broken_request_frees_its_connection() -> None:
    def broken() -> httpx.AsyncClient:
        def fail(request: httpx.Request) -> httpx.Response:
            raise httpx.ConnectError("refused", request=request)

        return httpx.AsyncClient(transport=httpx.MockTransport(fail), base_url="http://server")

    made = []

    def counted() -> httpx.AsyncClient:
        made.append(broken())
        return made[-1]

    pools = ConnectionPools(counted)
    for _ in range(2 * AT_ONCE):
        with pytest.raises(httpx.ConnectError):
            await pools.send(pools.first.build_request("GET", "/"))
    assert len(made) == 1
    await pools.close()
