from __future__ import annotations

import asyncio

from cotrain_server.parsing.loop_slots import AT_ONCE, LoopSlots


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
