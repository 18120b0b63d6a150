"""A tenant's requests wait for its own alone, and no more is kept of it than they are."""

from __future__ import annotations

import asyncio

from cotrain_server.limits.tenant_slots import TenantSlots
from cotrain_store.messages.ids import TenantId

A, B = TenantId("a"), TenantId("b")


async def test_no_more_of_a_tenant_are_in_at_once_and_they_come_in_order() -> None:
    slots, seen, leave = TenantSlots(at_once=2), list[str](), asyncio.Event()

    async def use(tenant: TenantId, name: str) -> None:
        async with slots.of(tenant):
            seen.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(use(A, name)) for name in ("a1", "a2", "a3", "a4")]
    tasks.append(asyncio.create_task(use(B, "b1")))
    await asyncio.sleep(0.01)
    assert seen == ["a1", "a2", "b1"]

    tasks[2].cancel()
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert seen == ["a1", "a2", "b1", "a4"]
    assert not slots._slots_by_tenant
    assert not slots._count_by_tenant
