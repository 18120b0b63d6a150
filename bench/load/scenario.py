"""Limits of the server without an engine: small passes, waiting clients, overload, bursts, a restarted Redis.

    python -m bench load [--parts small_passes,waiting,overload,burst,redis_restart]

Real processes use a real Redis that fsyncs every write, and the worker commits planned ops without computing. All
clients run on the same cores. Rates depend on the machine and on its other load. The report has the load average
before and after each part.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bench.load.local_server import (
    Client,
    LocalServer,
    answered,
    keys_of,
    local_server,
    new_run,
    pass_body,
    persist,
    trained,
)
from bench.load.null_worker import TOKENS_PER_OP
from bench.load.overload import burst, overload
from bench.support.processes import PATIENCE_S
from bench.support.record import Args, Options, Report, Some
from bench.support.timing import percentile
from cotrain_store.monitoring.logs_and_traces import configure_logs

TENANTS = {"small_passes": 16, "redis_restart": 32}
DEPTH = 4  # small passes in flight per tenant
WARM_S, CALM_S = 2.0, 3.0
REQUESTS_PER_TENANT = 200
IDLE_S = 3.0
#: Longer than the part `waiting` normally takes, because a poll is repeated after it.
LONG_POLL_S = 40.0
#: Longer than any timeout of our sockets and pools.
STANDSTILL_S = 10.0

Row = dict[str, Any]


def run(args: Args, report: Report) -> None:
    configure_logs("bench", "warning")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    report["parts"] = {}
    for name in args.parts:
        before = os.getloadavg()[0]
        with local_server() as server:
            found = asyncio.run(PARTS[name](server, args))
        report["parts"][name] = found | {"load_before": before, "load_after": os.getloadavg()[0]}
        print(name)
        for field, value in report["parts"][name].items():
            rows = value if isinstance(value, dict) else {"": value}
            for label, number in rows.items():
                shown = f"{number:,.2f}" if isinstance(number, float) else f"{number}"
                print(f"  {f'{field}: {label}' if label else field:<40} {shown:>14}", flush=True)


async def small_passes(server: LocalServer, args: Args) -> Row:
    """Measure the processor time of each process for one small pass: a POST, a poll and its result."""
    keys = keys_of(TENANTS["small_passes"])
    server.start(keys)
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
    await asyncio.sleep(args.seconds)
    spent, count = server.cpu_s(), seen["answered"] - first
    stop.set()
    await asyncio.gather(*loops)
    cpu_ms = {name: 1000 * (spent[name] - before[name]) / count for name in spent}
    return {"answered_per_s": count / args.seconds, "cpu_ms_per_pass": cpu_ms, "seen": dict(seen)}


async def waiting(server: LocalServer, args: Args) -> Row:
    """Hold polls in one API process, then resolve them at a steady pace: their memory, and the delay of results."""
    keys, times, seen = keys_of(-(-args.waiting // REQUESTS_PER_TENANT)), server.folder / "times", Counter[str]()
    server.start_api(keys, LONG_POLL_S)
    server.start_scheduler()
    accepted = await asyncio.gather(*(_accepted(server, key, seen) for key in keys))
    requests = [one for of_tenant in accepted for one in of_tenant][: args.waiting]
    api, seen = server.running["api"], Counter()
    empty_mb, began = api.rss_mb, time.monotonic()
    polls = [asyncio.create_task(answered(server.address, *one, seen)) for one in requests]
    await server.until_held(len(requests))
    held_after_s, held_mb, idle_from = time.monotonic() - began, api.rss_mb, api.cpu_s
    await asyncio.sleep(IDLE_S)
    idle_cpu = (api.cpu_s - idle_from) / IDLE_S
    per_cycle = max(1, round(args.wakes_per_s / 10))
    server.start_worker(f"--ops-per-s={args.wakes_per_s}", f"--ops-per-cycle={per_cycle}", f"--times={times}")
    answered_at = dict(await asyncio.gather(*polls))
    committed = dict(line.split() for line in times.read_text().splitlines())
    wakes_ms = [1000 * (at - float(committed[request])) for request, at in answered_at.items()]
    return {
        "waiting": len(requests), "all_held_after_s": held_after_s, "rss_mb_before": empty_mb, "rss_mb_waiting": held_mb,
        "kb_per_poll": (held_mb - empty_mb) * 1024 / len(requests), "idle_cpu_share": idle_cpu,
        "wake_p50_ms": percentile(wakes_ms, 0.5), "wake_p99_ms": percentile(wakes_ms, 0.99), "wake_max_ms": max(wakes_ms),
        "seen": dict(seen),
    }  # fmt: skip


async def _accepted(server: LocalServer, key: str, seen: Counter[str]) -> list[tuple[str, str]]:
    """Send the passes of one tenant; return its key and each request."""
    await server.until_held(0)  # the API is up
    client = Client(server.address, key)
    run = await new_run(client, seen)
    bodies = [pass_body(run, seq, TOKENS_PER_OP) for seq in range(1, 1 + REQUESTS_PER_TENANT)]
    accepted = [await persist(client, "forward_backward", body, seen) for body in bodies]
    client.close()
    return [(key, each["request_id"]) for each in accepted]


async def redis_restart(server: LocalServer, _: Args) -> Row:
    """Kill Redis under load and restart it; then suspend it for STANDSTILL_S."""
    keys = keys_of(TENANTS["redis_restart"])
    server.start(keys)
    seen, answered_at, stop = Counter[str](), list[float](), asyncio.Event()

    async def train(key: str) -> int:
        client, seq = Client(server.address, key), 0
        run = await new_run(client, seen)
        while not stop.is_set():
            seq += 1
            await trained(client, run, seq, seen)
            answered_at.append(time.monotonic())
        return seq

    tenants = [asyncio.create_task(train(key)) for key in keys]
    while len(answered_at) < 4 * len(keys):  # noqa: ASYNC110  # until everything is started and warm
        await asyncio.sleep(0.1)
    seen.clear()
    killed_at, redis = time.monotonic(), server.running["redis"]
    await asyncio.to_thread(redis.kill)
    await asyncio.to_thread(server.start_redis)
    started_after_s = time.monotonic() - killed_at
    await asyncio.sleep(CALM_S)
    after_kill, stopped_at, redis = dict(seen), time.monotonic(), server.running["redis"]
    redis.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STANDSTILL_S)
    redis.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(CALM_S)
    stop.set()
    sent = sum(await asyncio.wait_for(asyncio.gather(*tenants), PATIENCE_S))
    return {
        "redis_answered_again_after_s": started_after_s,
        "pause_after_the_kill_s": _pause(answered_at, killed_at, stopped_at), "seen_with_the_kill": after_kill,
        "standstill_s": STANDSTILL_S, "pause_over_the_standstill_s": _pause(answered_at, stopped_at, time.monotonic()),
        "seen_in_all": dict(seen), "sent": sent, "answered": len(answered_at),
    }  # fmt: skip


def _pause(answered_at: Sequence[float], since: float, until: float) -> float:
    """Return the longest time without a result between two moments, results in flight included."""
    between = [since, *sorted(at for at in answered_at if since < at < until), until]
    return max(after - before for before, after in itertools.pairwise(between))


PARTS = {
    "small_passes": small_passes, "waiting": waiting, "overload": overload, "burst": burst,
    "redis_restart": redis_restart,
}  # fmt: skip
OPTIONS: Options = {
    "parts": Some(tuple(PARTS)), "seconds": (15.0, "of small_passes and overload"),
    "waiting": (10_000, "futures outstanding at once"), "wakes_per_s": 500.0,
}  # fmt: skip
