"""Processor time of each process for one small pass: a POST, a poll and its result."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bench.load.local_server import Client, LocalServer, keys_of, local_server, new_run, trained

TENANTS = 16
DEPTH = 4  # passes in flight per tenant
WARM_S = 2.0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Keep DEPTH passes of each tenant in flight for `args.seconds`."""
    keys = keys_of(TENANTS)
    with local_server() as server:
        server.start(keys)
        return asyncio.run(_measure(server, keys, args.seconds))


async def _measure(server: LocalServer, keys: Sequence[str], seconds: float) -> dict[str, Any]:
    seen, stop = Counter[str](), asyncio.Event()

    async def train(client: Client, run: str, seqs: Iterator[int]) -> None:
        while not stop.is_set():
            await trained(client, run, next(seqs), seen)
            seen["answered"] += 1

    loops = []
    for key in keys:
        run, seqs = await new_run(Client(server.address, key), seen), itertools.count(1)
        loops += [asyncio.create_task(train(Client(server.address, key), run, seqs)) for _ in range(DEPTH)]
    await asyncio.sleep(WARM_S)
    before, first = server.cpu_s(), seen["answered"]
    await asyncio.sleep(seconds)
    spent, answered = server.cpu_s(), seen["answered"] - first
    stop.set()
    await asyncio.gather(*loops)
    return {
        "answered_per_s": answered / seconds,
        "cpu_ms_per_pass": {name: 1000 * (spent[name] - before[name]) / answered for name in spent},
        "seen": dict(seen),
    }
