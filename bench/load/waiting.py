"""Capacity of one API process for waiting polls: their number, memory, and delay of their results."""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.load.local_server import ADMIN_KEY, LocalServer, answered, keys_of, local_server, pass_body
from bench.load.null_worker import TOKENS_PER_OP, run_record
from bench.support.processes import PATIENCE_S
from bench.support.timing import percentile
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.ops import OpKind
from cotrain_store.oplog.intake import Intake
from cotrain_store.oplog.submission import TenantLimits
from cotrain_store.redis_client.connection import open_batching_connection
from cotrain_store.tenants.api_keys import Tenants, read_chosen_keys
from tests.support.limits import always

REQUESTS_PER_TENANT = 200
IDLE_S = 3.0
#: Longer than this part normally takes, because a poll is repeated after it.
LONG_POLL_S = 40.0


#: Key of the tenant, and the accepted request.
Waiting = tuple[str, RequestId]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Hold `args.waiting` polls in one API process, then resolve them at a steady pace."""
    keys = keys_of(tenants_of(args.waiting))
    with local_server() as server:
        server.start_api(keys, long_poll_s=LONG_POLL_S)
        server.start_scheduler()
        return asyncio.run(_measure(server, keys, args))


async def _measure(server: LocalServer, keys: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    api, times = server.running["api"], server.folder / "times"
    waiting = await accept(server, keys, args.waiting)
    await until_held(server, 0)  # the API is up
    empty_mb, seen = api.rss_mb, Counter[str]()
    began = time.monotonic()
    polls = [asyncio.create_task(answered(server.address, *one, seen)) for one in waiting]
    await until_held(server, len(waiting))
    held_after_s, held_mb, idle_from = time.monotonic() - began, api.rss_mb, api.cpu_s
    await asyncio.sleep(IDLE_S)
    idle_cpu = (api.cpu_s - idle_from) / IDLE_S
    per_cycle = max(1, round(args.wakes_per_s / 10))
    server.start_worker(f"--ops-per-s={args.wakes_per_s}", f"--ops-per-cycle={per_cycle}", f"--times={times}")
    answered_at = dict(await asyncio.gather(*polls))
    committed = dict(line.split() for line in times.read_text().splitlines())
    wakes_ms = [1000 * (at - float(committed[request])) for request, at in answered_at.items()]
    return {
        "waiting": len(waiting), "all_held_after_s": held_after_s, "rss_mb_before": empty_mb, "rss_mb_waiting": held_mb,
        "kb_per_poll": (held_mb - empty_mb) * 1024 / len(waiting), "idle_cpu_share": idle_cpu,
        "wake_p50_ms": percentile(wakes_ms, 0.5), "wake_p99_ms": percentile(wakes_ms, 0.99), "wake_max_ms": max(wakes_ms),
        "seen": dict(seen),
    }  # fmt: skip


def tenants_of(requests: int) -> int:
    """Return the number of tenants that this number of requests needs."""
    return -(-requests // REQUESTS_PER_TENANT)


async def accept(server: LocalServer, keys: Sequence[str], count: int) -> list[Waiting]:
    """Accept `count` requests directly in the store, as accepting is not measured here."""
    connection = open_batching_connection(server.redis_url)
    spool = Spool(server.folder / "data" / "spool", new_writer("bench"))
    intake = Intake(connection, spool, always(TenantLimits()))
    tenants = Tenants(connection)
    await tenants.take(read_chosen_keys(keys))  # as the API did

    async def of_one_tenant(number: int, key: str) -> list[Waiting]:
        tenant = await tenants.authenticate(key)
        run = run_record(number, tenant.id)
        requests = [await intake.create_run(run)]
        for seq in range(1, REQUESTS_PER_TENANT):
            body = pass_body(run.id, seq, TOKENS_PER_OP)
            op = seq, OpKind.FORWARD_BACKWARD, body, TOKENS_PER_OP
            requests.append(await intake.submit(run, *op, digest=f"{seq}"))
        return [(key, request) for request in requests]

    found = await asyncio.gather(*(of_one_tenant(*item) for item in enumerate(keys)))
    spool.close()
    await connection.aclose()
    return [one for requests in found for one in requests][:count]


async def until_held(server: LocalServer, count: int) -> None:
    """Wait until the only API process holds `count` polls.

    Raises:
        TimeoutError: polls expire as fast as new ones arrive.
    """
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(held, server) < count:  # noqa: ASYNC110  # there is no notification
            await asyncio.sleep(0.2)


def held(server: LocalServer) -> int:
    """Return the number of polls that an API process holds; -1 if it does not respond."""
    host, port = server.address
    try:
        request = urllib.request.Request(f"http://{host}:{port}/metrics", None, {"X-API-Key": ADMIN_KEY})
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read().decode()
    except OSError:
        return -1
    return int(float(text.split("\ncotrain_longpoll_waiters ")[1].split("\n")[0]))
