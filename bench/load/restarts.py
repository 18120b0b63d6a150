"""Restarts under load: an API process replaced behind its port, and a Redis that is killed or suspended."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.load.http import Client, answered, new_run, persist, trained
from bench.load.local_server import LocalServer, keys_of, local_server
from bench.load.waiting import LONG_POLL_S, accept, tenants_of, until_held
from bench.support.processes import PATIENCE_S
from cotrain_store.keys import result_keys

WAITING = 2_000
TENANTS = 32
#: Rate of other requests, sent at the same time.
ASKS_PER_S = 50.0
#: Longer than any timeout of our sockets and pools.
STANDSTILL_S = 10.0
CALM_S = 3.0


def measure_api(args: argparse.Namespace) -> dict[str, Any]:
    """Replace an API process that holds polls, first by an orderly restart, then by kill -9."""
    keys = keys_of(tenants_of(WAITING))
    with local_server() as server:
        server.start_api(keys, "first", long_poll_s=LONG_POLL_S)
        server.start_scheduler()
        return asyncio.run(_measure_api(server, keys))


async def _measure_api(server: LocalServer, keys: Sequence[str]) -> dict[str, Any]:
    waiting, polled, asked = await accept(server, keys, WAITING), Counter[str](), Counter[str]()
    polls = [asyncio.create_task(answered(server.address, *one, polled)) for one in waiting]
    await until_held(server, WAITING)
    asking = asyncio.create_task(_ask(server, keys[0], asked))
    await _start_api(server, keys, "second", 2)
    ended_after_s = await asyncio.to_thread(server.running.pop("first").stop)
    began = time.monotonic()
    await until_held(server, WAITING)
    moved_after_s = ended_after_s + time.monotonic() - began
    orderly = {"orderly_polls": dict(polled), "orderly_others": dict(asked)}
    polled.clear()
    asked.clear()
    server.running.pop("second").kill()
    began = time.monotonic()
    await _start_api(server, keys, "third", 1)
    await until_held(server, WAITING)
    back_after_s = time.monotonic() - began
    server.start_worker()
    results = await asyncio.wait_for(asyncio.gather(*polls), PATIENCE_S)
    asking.cancel()
    return {
        "waiting": len(waiting), "drained_after_s": ended_after_s, "all_polls_moved_after_s": moved_after_s, **orderly,
        "after_a_kill_all_back_after_s": back_after_s, "killed_polls": dict(polled), "killed_others": dict(asked),
        "answered": len(results),
    }  # fmt: skip


async def _start_api(server: LocalServer, keys: Sequence[str], name: str, listening: int) -> None:
    server.start_api(keys, name, long_poll_s=LONG_POLL_S)
    with server.connected() as redis:
        channel = result_keys.notify_results()
        while redis.pubsub_numsub(channel)[0][1] < listening:  # noqa: ASYNC110  # there is no notification
            await asyncio.sleep(0.05)


async def _ask(server: LocalServer, key: str, seen: Counter[str]) -> None:
    """Open a session periodically as a cheap probe request."""
    client = Client(server.address, key)
    while True:
        await persist(client, "create_session", {}, seen)
        await asyncio.sleep(1 / ASKS_PER_S)


def measure_redis(args: argparse.Namespace) -> dict[str, Any]:
    """Kill Redis under load and restart it; then suspend it for STANDSTILL_S."""
    keys = keys_of(TENANTS)
    with local_server() as server:
        server.start(keys)
        return asyncio.run(_measure_redis(server, keys))


async def _measure_redis(server: LocalServer, keys: Sequence[str]) -> dict[str, Any]:
    seen, answered_at = Counter[str](), list[float]()
    stop = asyncio.Event()
    tenants = [asyncio.create_task(_train(server, key, stop, seen, answered_at)) for key in keys]
    while len(answered_at) < 4 * TENANTS:  # noqa: ASYNC110  # until everything is started and warm
        await asyncio.sleep(0.1)
    seen.clear()
    killed_at = time.monotonic()
    await asyncio.to_thread(server.running["redis"].kill)
    await asyncio.to_thread(server.start_redis)
    started_after_s = time.monotonic() - killed_at
    await asyncio.sleep(CALM_S)
    after_kill, stopped_at = dict(seen), time.monotonic()
    server.running["redis"].process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STANDSTILL_S)
    server.running["redis"].process.send_signal(signal.SIGCONT)
    await asyncio.sleep(CALM_S)
    stop.set()
    sent = sum(await asyncio.wait_for(asyncio.gather(*tenants), PATIENCE_S))
    return {
        "redis_answered_again_after_s": started_after_s,
        "pause_after_the_kill_s": _pause(answered_at, killed_at, stopped_at),
        "seen_with_the_kill": after_kill,
        "standstill_s": STANDSTILL_S,
        "pause_over_the_standstill_s": _pause(answered_at, stopped_at, time.monotonic()),
        "seen_in_all": dict(seen),
        "sent": sent,
        "answered": len(answered_at),
    }


async def _train(
    server: LocalServer, key: str, stop: asyncio.Event, seen: Counter[str], answered_at: list[float]
) -> int:
    client, seq = Client(server.address, key), 0
    run = await new_run(client, seen)
    while not stop.is_set():
        seq += 1
        await trained(client, run, seq, seen)
        answered_at.append(time.monotonic())
    return seq


def _pause(answered_at: Sequence[float], since: float, until: float) -> float:
    """Return the longest time without a result between two moments, results in flight included."""
    between = [since, *sorted(at for at in answered_at if since < at < until), until]
    return max(after - before for before, after in itertools.pairwise(between))
