"""Throughput of accepting, planning, committing and answering requests, without an engine.

256 tenants with four requests in flight each use a Redis that fsyncs every write. One part calls the store directly
(this process replaces the API), the other uses HTTP (this process runs all the clients).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.load.http import Client, new_run, pass_body, trained
from bench.load.local_server import LocalServer, local_server
from bench.load.null_worker import TOKENS_PER_OP, run_record
from bench.support.timing import percentile
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.intake import Intake
from cotrain_store.oplog.submission import TenantLimits
from cotrain_store.redis_client.connection import open_batching_connection
from cotrain_store.results.futures import Futures, Pending
from tests.support.limits import always

#: Sends the request with this seq and waits for its result.
Ask = Callable[[int], Awaitable[None]]

WARM_S = 2.0


@dataclass
class Tally:
    """Requests answered while counting: latency of each, and CPU time of each process."""

    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        answered = len(self.latencies_s)
        return {
            "answered_per_s": answered / self.seconds,
            "p50_ms": percentile(self.latencies_s, 0.5) * 1000,
            "p99_ms": percentile(self.latencies_s, 0.99) * 1000,
            "cpu_ms_per_request": {
                name: 1000 * spent / answered for name, spent in self.cpu_s.items()
            },
        }


async def drive(server: LocalServer, asks: Sequence[Ask], depth: int, seconds: float) -> Tally:
    """Keep `depth` requests of every tenant in flight; `asks[i](seq)` sends one and waits for its result."""
    tally, is_counting, stop = Tally(seconds), asyncio.Event(), asyncio.Event()

    async def client(ask: Ask, seqs: itertools.count[int]) -> None:
        while not stop.is_set():
            began = time.perf_counter()
            await ask(next(seqs))
            if is_counting.is_set():
                tally.latencies_s.append(time.perf_counter() - began)

    clients = [
        asyncio.create_task(client(ask, seqs))
        for ask, seqs in [(ask, itertools.count(1)) for ask in asks]
        for _ in range(depth)
    ]
    await asyncio.sleep(WARM_S)
    before = server.cpu_s()
    is_counting.set()
    await asyncio.sleep(seconds)
    is_counting.clear()
    tally.cpu_s = {name: after - before[name] for name, after in server.cpu_s().items()}
    stop.set()
    await asyncio.gather(*clients)
    return tally


def measure_store(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the path through the store: submit, plan, commit, wake, read."""
    with local_server() as server:
        server.start_scheduler()
        server.start_worker()
        return asyncio.run(_through_the_store(server, args))


async def _through_the_store(server: LocalServer, args: argparse.Namespace) -> dict[str, Any]:
    connection = open_batching_connection(server.redis_url)
    spool = Spool(server.folder / "data" / "spool", new_writer("api"))
    async with Futures(connection, spool) as futures:
        intake = Intake(connection, spool, always(TenantLimits()))

        async def tenant(number: int) -> Ask:
            run = run_record(number, TenantId(f"t{number}"))
            await _answered(futures, run, await intake.create_run(run))

            async def ask(seq: int) -> None:
                body = pass_body(run.id, seq, TOKENS_PER_OP)
                request = await intake.submit(
                    run, seq, OpKind.FORWARD_BACKWARD, body, TOKENS_PER_OP, digest=f"{seq}"
                )
                await _answered(futures, run, request)

            return ask

        asks = await asyncio.gather(*(tenant(number) for number in range(args.tenants)))
        tally = await drive(server, asks, args.depth, args.seconds)
    spool.close()
    await connection.aclose()
    return tally.row()


def measure_http(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the same through HTTP."""
    keys = [f"tml-load-{number:012}" for number in range(args.tenants)]
    with local_server() as server:
        server.start_scheduler()
        server.start_worker()
        server.start_api(keys)
        return asyncio.run(_through_http(server, keys, args))


async def _through_http(
    server: LocalServer, keys: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    seen = Counter[str]()

    async def tenant(key: str) -> Ask:
        idle = [Client(server.address, key) for _ in range(args.depth)]
        run = await new_run(idle[0], seen)

        async def ask(seq: int) -> None:
            client = idle.pop()
            await trained(client, run, seq, seen)
            idle.append(client)

        return ask

    asks = [await tenant(key) for key in keys]
    tally = await drive(server, asks, args.depth, args.seconds)
    return {**tally.row(), "seen": dict(seen)}


async def _answered(futures: Futures, run: RunRecord, request: RequestId) -> None:
    while isinstance(await futures.wait(run.tenant, request, 30.0), Pending):
        pass
