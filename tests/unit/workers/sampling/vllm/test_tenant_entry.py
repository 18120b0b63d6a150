from __future__ import annotations

import asyncio
from collections import Counter

from cotrain_workers.sampling.vllm.tenant_entry import KEPT_SHARE, TenantEntry

PLACES = 2 * KEPT_SHARE
"""Two of them are kept."""


class Guests:
    """Sequences that stay until they are sent away."""

    def __init__(self) -> None:
        self.entry = TenantEntry(PLACES)
        self.inside: list[str] = []
        self._leave: dict[str, list[asyncio.Event]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def come(self, tenant: str, count: int) -> None:
        self._tasks += [asyncio.create_task(self._stay(tenant)) for _ in range(count)]
        await settled()

    async def leave(self, tenant: str) -> None:
        self._leave[tenant].pop(0).set()
        await settled()

    async def _stay(self, tenant: str) -> None:
        async with self.entry.of(tenant):
            self.inside.append(tenant)
            leave = asyncio.Event()
            self._leave.setdefault(tenant, []).append(leave)
            await leave.wait()
        self.inside.remove(tenant)

    async def cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_newcomer_enters_at_once_beside_one_that_sends_thousands() -> None:
    guests = Guests()
    await guests.come("heavy", 1_000)
    assert Counter(guests.inside) == {"heavy": PLACES - 2}

    await guests.come("light", 1)
    await guests.come("other", 1)

    assert Counter(guests.inside) == {"heavy": PLACES - 2, "light": 1, "other": 1}
    await guests.cancel_all()


async def test_places_go_to_the_tenant_that_has_the_fewest() -> None:
    guests = Guests()
    await guests.come("heavy", 1_000)
    await guests.come("light", 100)
    for _ in range(2 * PLACES):
        await guests.leave("heavy")

    assert Counter(guests.inside)["light"] >= PLACES // 2 - 1
    assert len(guests.inside) == PLACES - 2 + 1 or len(guests.inside) == PLACES - 2
    await guests.cancel_all()


async def test_who_is_cancelled_waiting_or_inside_keeps_no_place() -> None:
    guests = Guests()
    await guests.come("a", 1_000)
    await guests.cancel_all()
    again = Guests()
    again.entry = guests.entry

    await again.come("b", 1_000)

    assert len(again.inside) == PLACES - 2
    await again.cancel_all()
