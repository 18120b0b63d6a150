"""When waiting requests are read: a flood's in a part of the time, if other tenants work."""

from __future__ import annotations

import asyncio

from cotrain_server.http.request_queue import ACTIVE_S, AT_ONCE, Caller
from cotrain_server.http.request_reader import FLOOD_SHARE, LONGEST_PAUSE_S, RequestReader
from cotrain_store.messages.ids import TenantId

FLOOD, ORDINARY = Caller(TenantId("flood")), Caller(TenantId("ordinary"))
MANY = 40 * AT_ONCE
#: Of this process's time, for each request that is read.
BUSY_S = 0.001
ROUND_S = AT_ONCE * BUSY_S


class Played:
    """A reader whose clock stands still until the test moves it; reading makes it busy."""

    def __init__(self) -> None:
        self.now, self.busy = 100.0, 50.0
        self.read: list[str] = []
        self.reader = RequestReader[str](self._note, lambda: self.now, lambda: self.busy)

    def _note(self, name: str) -> None:
        self.read.append(name)
        self.busy += BUSY_S

    async def pass_time(self, seconds: float, *, busy: float = 0.0) -> None:
        self.now += seconds
        self.busy += busy
        await settle()
        await asyncio.sleep(LONGEST_PAUSE_S)  # longer than any timer that was set before
        await settle()


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def flood(played: Played) -> None:
    for _ in range(MANY):
        played.reader.wait(FLOOD, "flood")


async def ask(played: Played) -> None:
    played.reader.wait(ORDINARY, "ordinary")
    await settle()


async def test_a_tenant_alone_has_all_the_time() -> None:
    played = Played()
    flood(played)
    await settle()
    assert len(played.read) == MANY


async def test_next_to_another_tenant_a_flood_waits_as_long_as_its_requests_took() -> None:
    played = Played()
    await ask(played)
    flood(played)
    await settle()
    assert played.read.count("flood") <= 2 * AT_ONCE
    for _ in range(3):
        before = played.read.count("flood")
        await played.pass_time(ROUND_S)
        assert played.read.count("flood") == before
        await played.pass_time(ROUND_S / FLOOD_SHARE)
        assert played.read.count("flood") == before + AT_ONCE


async def test_who_comes_in_a_pause_is_read_at_once_and_no_flood_with_it() -> None:
    played = Played()
    await ask(played)
    flood(played)
    await settle()
    before = played.read.count("flood")
    for asked in range(5):
        played.reader.wait(Caller(TenantId(f"other {asked}")), "other")
        await settle()
        assert played.read.count("other") == asked + 1
    assert played.read.count("flood") <= before + AT_ONCE


async def test_a_flood_goes_on_where_others_take_all_the_time() -> None:
    played = Played()
    await ask(played)
    flood(played)
    await settle()
    for _ in range(3):
        before = played.read.count("flood")
        await played.pass_time(2 * LONGEST_PAUSE_S, busy=2 * LONGEST_PAUSE_S)
        assert played.read.count("flood") > before


async def test_a_flood_has_all_the_time_again_when_the_others_have_gone() -> None:
    played = Played()
    await ask(played)
    flood(played)
    await settle()
    assert len(played.read) < MANY
    await played.pass_time(ACTIVE_S + 1, busy=ACTIVE_S)
    assert len(played.read) == 1 + MANY
