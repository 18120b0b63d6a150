"""Overload by a factor of three: accepted requests are kept, the others are rejected at once."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.load.local_server import Client, LocalServer, answered, keys_of, local_server, new_run, pass_body
from bench.load.null_worker import TOKENS_PER_OP
from bench.support.timing import percentile

TENANTS = 32
CAPACITY_PER_S = 60.0
FACTOR = 3.0
#: Per tenant; the queue of all tenants together takes about four seconds.
QUOTA_OPS = 8
SAMPLE_S = 0.5


@dataclass
class Seen:
    """Outcomes of the requests, and memory of the processes."""

    statuses: Counter[str] = field(default_factory=Counter)
    refused_ms: list[float] = field(default_factory=list)
    accepted_ms: list[float] = field(default_factory=list)
    answers: list[asyncio.Task[Any]] = field(default_factory=list)
    api_mb: list[float] = field(default_factory=list)
    redis_mb: list[float] = field(default_factory=list)
    queued_ops: list[int] = field(default_factory=list)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Offer FACTOR times the capacity, in an open loop, for `args.seconds`."""
    keys = keys_of(TENANTS)
    rates = f"--ops-per-s={CAPACITY_PER_S}", f"--ops-per-cycle={CAPACITY_PER_S / 10:.0f}"
    with local_server() as server:
        server.start(keys, *rates, QUOTAS=f"ops={QUOTA_OPS}")
        return asyncio.run(_measure(server, keys, args.seconds))


async def _measure(server: LocalServer, keys: Sequence[str], seconds: float) -> dict[str, Any]:
    seen = Seen()
    runs = [await new_run(Client(server.address, key), seen.statuses) for key in keys]
    seen.statuses.clear()
    ends_at = time.monotonic() + seconds
    watching = asyncio.create_task(_watch(server, seen))
    await asyncio.gather(
        *(_offer(server, key, run, random.Random(key), ends_at, seen) for key, run in zip(keys, runs, strict=True))
    )
    watching.cancel()
    accepted, refused = len(seen.accepted_ms), len(seen.refused_ms)
    await asyncio.wait_for(asyncio.gather(*seen.answers), 60)
    third, served_ms = len(seen.api_mb) // 3, refused_in_server_ms(server)
    return {
        "offered_per_s": (accepted + refused) / seconds,
        "capacity_per_s": CAPACITY_PER_S,
        "accepted": accepted,
        "refused": refused,
        "answered_of_accepted": sum(not answer.exception() for answer in seen.answers),
        "refused_p50_ms": percentile(seen.refused_ms, 0.5),
        "refused_p99_ms": percentile(seen.refused_ms, 0.99),
        "refused_p50_ms_in_server": percentile(served_ms, 0.5),
        "refused_p99_ms_in_server": percentile(served_ms, 0.99),
        "accepted_p99_ms": percentile(seen.accepted_ms, 0.99),
        "queued_ops_max": max(seen.queued_ops),
        "queued_ops_bound": TENANTS * QUOTA_OPS,
        "api_mb_after_a_third": seen.api_mb[third],
        "api_mb_at_the_end": seen.api_mb[-1],
        "redis_mb_after_a_third": seen.redis_mb[third],
        "redis_mb_at_the_end": seen.redis_mb[-1],
        "redis_kb_kept_per_answer": (seen.redis_mb[-1] - seen.redis_mb[third]) * 1024
        / (CAPACITY_PER_S * seconds * 2 / 3),
        "seen": dict(seen.statuses),
    }  # fmt: skip


async def _offer(server: LocalServer, key: str, run: str, chance: random.Random, ends_at: float, seen: Seen) -> None:
    """Send at random times, independent of the responses; a rejected request is not sent again."""
    client, seq, due = Client(server.address, key), 1, time.monotonic()
    while due < ends_at:
        due += chance.expovariate(CAPACITY_PER_S * FACTOR / TENANTS)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        began = time.perf_counter()
        status, answer = await client.post("forward_backward", pass_body(run, seq, TOKENS_PER_OP))
        took_ms = 1000 * (time.perf_counter() - began)
        seen.statuses[f"forward_backward {status}"] += 1
        if status == 200:
            assert isinstance(answer, dict)
            seq += 1
            seen.accepted_ms.append(took_ms)
            result = answered(server.address, key, answer["request_id"], seen.statuses)
            seen.answers.append(asyncio.create_task(result))
        else:
            assert status == 429, answer
            seen.refused_ms.append(took_ms)


def refused_in_server_ms(server: LocalServer) -> list[float]:
    """Return the server-side duration of each rejection, from the API's log."""
    lines = (server.folder / "api.log").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["dur_ms"] for event in events if event.get("code") == 429]


async def _watch(server: LocalServer, seen: Seen) -> None:
    with server.connected() as redis:
        while True:
            await asyncio.sleep(SAMPLE_S)
            names = [name for name in redis.scan_iter("*queue:*") if redis.type(name) == b"hash"]
            seen.queued_ops.append(sum(int(redis.hget(name, "ops") or 0) for name in names))
            seen.redis_mb.append(redis.info("memory")["used_memory"] / 2**20)
            seen.api_mb.append(server.running["api"].rss_mb)
