"""Parser of large bodies in threads and processes: one body per tenant at a time, and its memory is
returned to the host.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cotrain_server.errors import BodyTooLarge, Invalid, Unreadable
from cotrain_server.parser import AT_ONCE, CHILD_ABOVE, THREAD_ABOVE, ChildProcess, Parser, trim_heap
from cotrain_server.requests.passes import json_object
from cotrain_store.messages.ids import TenantId

ALICE, BOB = TenantId("alice"), TenantId("bob")
LIGHT, HEAVY, VAST = THREAD_ABOVE, THREAD_ABOVE + 1, CHILD_ABOVE + 1
MIB = 1024**2


@pytest.fixture(scope="module")
def parser() -> Iterator[Parser]:
    opened = Parser()
    yield opened
    opened.close()


class Gate:
    """Work that blocks until `open` is set, and counts its concurrent calls."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.inside = 0

    def work(self) -> int:
        self.inside += 1
        self.entered.release()
        self.open.wait()
        self.inside -= 1
        return 1

    async def until_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


async def test_light_work_runs_in_place_and_heavy_work_in_a_thread(parser: Parser) -> None:
    here = threading.get_ident()
    assert await parser.run(ALICE, LIGHT, threading.get_ident) == here
    assert await parser.run(ALICE, HEAVY, threading.get_ident) != here
    assert await parser.parse_json(ALICE, HEAVY, os.getpid) == os.getpid()


async def test_a_tenant_has_one_heavy_task_at_a_time(parser: Parser) -> None:
    gate = Gate()
    first = [asyncio.create_task(parser.run(ALICE, HEAVY, gate.work)) for _ in range(5)]
    await gate.until_entered()
    other = asyncio.create_task(parser.run(BOB, HEAVY, gate.work))
    await gate.until_entered()  # concurrent with the first one, before the other four
    assert gate.inside == 2
    gate.open.set()
    assert await asyncio.gather(*first, other) == [1] * 6


async def test_a_cancelled_task_delays_the_next_one_of_its_tenant_until_it_ends(parser: Parser) -> None:
    gate = Gate()
    first = asyncio.create_task(parser.run(ALICE, HEAVY, gate.work))
    await gate.until_entered()
    first.cancel()
    second = asyncio.create_task(parser.run(ALICE, HEAVY, gate.work))
    for _ in range(10):
        await asyncio.sleep(0)
    assert gate.inside == 1
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == 1


async def test_vast_json_is_parsed_in_another_process(parser: Parser) -> None:
    assert await parser.parse_json(ALICE, VAST, os.getpid) != os.getpid()
    assert await parser.parse_json(ALICE, VAST, json_object, b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(Unreadable, match="not a JSON object"):
        await parser.parse_json(ALICE, VAST, json_object, b"[]")


async def test_other_work_continues_while_vast_json_is_parsed(parser: Parser) -> None:
    """A parser holds the GIL: in a thread, it would block all other work."""
    await parser.parse_json(ALICE, VAST, os.getpid)  # its process has started
    body = b'{"a": [' + b"1," * 2_000_000 + b"1]}"
    parsing = asyncio.create_task(parser.parse_json(ALICE, VAST, _size_of_list, body))
    steps = 0
    while not parsing.done():
        await asyncio.sleep(0)
        steps += 1
    assert await parsing == 2_000_001
    assert steps > 100  # in a thread it is 2: one before and one after


async def test_the_memory_of_vast_json_belongs_to_the_other_process(parser: Parser) -> None:
    body = b'{"a": [' + b"[1]," * 200_000 + b"1]}"
    await parser.parse_json(ALICE, VAST, os.getpid)
    before = resident_bytes()
    await parser.parse_json(ALICE, VAST, _size_of_list, body)
    assert resident_bytes() - before < 8 * MIB  # 200,000 lists and numbers are 20 MiB


async def test_a_crashed_process_fails_its_request_and_is_replaced(parser: Parser) -> None:
    with pytest.raises(BodyTooLarge, match="too much memory"):
        await parser.parse_json(ALICE, VAST, _crash)
    assert await parser.parse_json(ALICE, VAST, _size_of_list, b'{"a": [1]}') == 1


async def test_a_body_that_needs_too_much_memory_fails_alone(parser: Parser) -> None:
    with pytest.raises(BodyTooLarge, match="too much memory"):
        await parser.parse_json(ALICE, VAST, bytes, 1 << 40)
    assert await parser.parse_json(ALICE, VAST, _size_of_list, b'{"a": [1]}') == 1


async def test_an_error_of_the_other_process_is_raised_here(parser: Parser) -> None:
    with pytest.raises(Invalid, match="this is why"):
        await parser.parse_json(ALICE, VAST, _refuse, "this is why")


@pytest.mark.parametrize("hostile", ["_spin_shortly", "_crash"])
async def test_tenants_of_costly_bodies_leave_processes_for_the_others(tmp_path: Path, hostile: str) -> None:
    """A tenant is one of the others after its first cheap body."""
    parser = Parser(costly_s=0.05)
    known = [TenantId(f"hostile-{number}") for number in range(AT_ONCE)]
    tenants = [*known, *(TenantId(f"new-{number}") for number in range(AT_ONCE))]
    opened = tmp_path / "open"
    try:
        await parser.run_in_child(ALICE, int)
        for tenant in known:
            await parser.run_in_child(tenant, int)
            with suppress(BodyTooLarge):
                await parser.run_in_child(tenant, globals()[hostile])
            await parser.run_in_child(tenant, int)  # does not count for a minute
        again = [asyncio.create_task(parser.run_in_child(tenant, _await_file, opened)) for tenant in tenants]
        assert await asyncio.create_task(parser.run_in_child(ALICE, int)) == 0  # while they wait for the file
        opened.touch()
        assert await asyncio.gather(*again) == [None] * len(tenants)  # in turn
    finally:
        opened.touch()
        parser.close()


def test_freed_memory_is_returned_to_the_host() -> None:
    """glibc keeps memory that a thread has freed below a block still in use."""
    kept: list[bytes] = []

    def fill() -> None:
        blocks = [bytes(60_000) for _ in range(2_000)]  # 120 MB, each block below the mmap threshold
        kept.append(bytes(60_000))
        del blocks

    before = resident_bytes()
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    trim_heap()
    assert resident_bytes() - before < 24 * MIB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _spin_shortly(cpu_s: float = 0.1) -> None:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


def _await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _size_of_list(body: bytes) -> int:
    return len(json_object(body)["a"])


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _refuse(why: str) -> None:
    raise Invalid(why)


async def test_two_tenants_in_threads_do_not_block_a_third(parser: Parser) -> None:
    gate = Gate()
    tenants = [ALICE, BOB, TenantId("carol")]
    work = [asyncio.create_task(parser.run(tenant, HEAVY, gate.work)) for tenant in tenants]
    for _ in tenants:
        await gate.until_entered()
    assert gate.inside == 3
    gate.open.set()
    assert await asyncio.gather(*work) == [1, 1, 1]


async def test_two_tenants_in_processes_do_not_block_a_third(parser: Parser, tmp_path: Path) -> None:
    gates = [tmp_path / name for name in ("alice", "bob")]
    for gate in gates:
        os.mkfifo(gate)
    hostile = [
        asyncio.create_task(parser.run_in_child(tenant, Path.read_text, gate))
        for tenant, gate in zip((ALICE, BOB), gates, strict=True)
    ]
    assert await parser.run_in_child(TenantId("carol"), os.getpid) != os.getpid()
    for gate in gates:
        await asyncio.to_thread(gate.write_text, "done")
    assert await asyncio.gather(*hostile) == ["done", "done"]


def test_a_call_over_its_processor_time_is_ended_with_its_process() -> None:
    child = ChildProcess(max_cpu_s=0.1)
    try:
        with pytest.raises(BodyTooLarge, match=r"more than 0\.1 s of processor time to read"):
            child.run(_spin)
        assert child.run(max, 1, 2) == 2
    finally:
        child.stop()


def _spin() -> None:
    while True:
        pass
