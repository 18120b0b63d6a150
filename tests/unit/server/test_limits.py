"""Limits in one process. State is kept only for requests in progress."""

import asyncio

import pytest

from cotrain_server.errors import TooManyFailures
from cotrain_server.limits import AT_ONCE, WRONG_KEYS_PER_MINUTE, LoopSlots, TenantSlots, WrongKeyCounter, body_memory
from cotrain_store.errors import Reason
from cotrain_store.messages.ids import TenantId
from tests.support.refusals import refused

A, B = TenantId("a"), TenantId("b")


async def test_few_requests_start_in_one_iteration_and_in_order_of_arrival() -> None:
    slots, started = LoopSlots(), list[int]()

    async def request(number: int) -> None:
        await slots.take()
        started.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(10 * AT_ONCE)]
    most = 0
    while len(started) < len(tasks):
        before = len(started)
        await asyncio.sleep(0)
        most = max(most, len(started) - before)

    assert (most, started) == (AT_ONCE, list(range(len(tasks))))


async def test_a_client_that_disconnects_takes_no_slot() -> None:
    slots = LoopSlots()
    tasks = [asyncio.create_task(slots.take()) for _ in range(4 * AT_ONCE)]
    await asyncio.sleep(0)
    for task in tasks[AT_ONCE : 3 * AT_ONCE]:
        task.cancel()

    await asyncio.wait_for(asyncio.gather(*tasks[:AT_ONCE], *tasks[3 * AT_ONCE :]), 5)
    assert [task.cancelled() for task in tasks] == [AT_ONCE <= number < 3 * AT_ONCE for number in range(len(tasks))]
    await asyncio.wait_for(slots.take(), 5)


async def test_the_requests_of_a_tenant_are_limited_and_run_in_order() -> None:
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


def test_bodies_of_one_tenant_share_a_limit_until_they_are_answered() -> None:
    memory = body_memory(max_bytes=10)
    with memory.of(A) as first:
        first(6)
        with memory.of(B) as of_another:
            of_another(10)
        with memory.of(A) as second:
            second(4)
            with refused(Reason.TOO_MANY_BODIES):
                second(1)
            with refused(Reason.TOO_MANY_BODIES):
                first(1)
        first(4)
    with memory.of(A) as third:
        third(10)


def test_a_single_body_is_always_admitted_and_excludes_others() -> None:
    memory = body_memory(max_bytes=10)
    with memory.of(A) as large:
        large(8)
        large(8)
        with memory.of(A) as small, refused(Reason.TOO_MANY_BODIES):
            small(1)


def test_a_refused_body_leaves_no_state() -> None:
    memory = body_memory(max_bytes=10)

    def broken() -> None:
        with memory.of(A) as take:
            take(9)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert not memory


def test_the_eleventh_failure_in_a_minute_is_refused() -> None:
    now = [0.0]
    failures = WrongKeyCounter(lambda: now[0])
    for _ in range(WRONG_KEYS_PER_MINUTE):
        failures.count("192.0.2.1")
    with pytest.raises(TooManyFailures):
        failures.count("192.0.2.1")
    failures.count("192.0.2.2")
    now[0] = 61.0
    failures.count("192.0.2.1")
