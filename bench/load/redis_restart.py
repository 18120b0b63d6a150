"""Redis that is killed and restarted, then suspended, under load."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.load.local_server import Client, LocalServer, keys_of, local_server, new_run, trained
from bench.support.processes import PATIENCE_S

TENANTS = 32
#: Longer than any timeout of our sockets and pools.
STANDSTILL_S = 10.0
CALM_S = 3.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Kill Redis under load and restart it; then suspend it for STANDSTILL_S."""
    keys = keys_of(TENANTS)
    with local_server() as server:
        server.start(keys)
        return asyncio.run(_measure(server, keys))


async def _measure(server: LocalServer, keys: Sequence[str]) -> dict[str, Any]:
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
