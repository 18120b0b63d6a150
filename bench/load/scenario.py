"""Limits of the server without an engine: small passes, three times its capacity, and a burst of large passes.

    python -m bench load [--parts small_passes,bare_passes,overload,burst]

Real processes use a real Redis that fsyncs every write, and the worker commits planned ops without computing. All
clients run on the same cores. Rates depend on the machine and on its other load. The report has the load average
before and after each part.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from bench.load.local_server import (
    Address,
    Body,
    Client,
    LocalServer,
    keys_of,
    local_server,
    new_run,
    pass_body,
    persist,
)
from bench.load.null_worker import TOKENS_PER_OP
from bench.support.record import Args, Options, Report, Some, show
from bench.support.timing import percentile
from cotrain.wire.proto import wire_pb2
from cotrain_store.monitoring.logs import configure_logs
from cotrain_store.redis_client.connection import open_sync_connection

# Small passes
SMALL_TENANTS, DEPTH = 16, 4  # passes in flight per tenant
WARM_S = 2.0
# Overload
TENANTS, CAPACITY_PER_S, FACTOR = 32, 60.0, 3.0
#: Per tenant; the queue of all tenants together takes about four seconds.
QUOTA_OPS = 8
SAMPLE_S = 0.5
# Burst
BURST_TENANTS, PASSES, SAMPLES = 16, 208, 512
#: Datums of 1,024 tokens of 16 bytes each: 3.3 MB.
DATUMS, TOKENS = 201, 1_024
BEAT_EVERY_S = 0.02

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
        show({"part": name, **report["parts"][name]})


async def small_passes(server: LocalServer, args: Args) -> Row:
    """Measure the processor time of each process for one small pass: a POST, a poll and its result."""
    keys, seen = keys_of(SMALL_TENANTS), Counter[str]()
    server.start(keys)
    runs = {key: await new_run(Client(server.address, key), seen) for key in keys}
    return await _passes(server, args, runs, seen)


async def bare_passes(server: LocalServer, args: Args) -> Row:
    """Measure the same requests to a bare FastAPI application, which stores a body with an fsync, and reads it."""
    server.start_bare()
    return await _passes(server, args, dict.fromkeys(keys_of(SMALL_TENANTS), "run"), Counter())


async def _passes(server: LocalServer, args: Args, runs: dict[str, str], seen: Counter[str]) -> Row:
    stop = asyncio.Event()

    async def train(client: Client, run: str, seqs: Iterator[int]) -> None:
        while not stop.is_set():
            await _trained(client, run, next(seqs), seen)
            seen["answered"] += 1

    loops = []
    for key, run in runs.items():
        seqs = itertools.count(1)
        loops += [asyncio.create_task(train(Client(server.address, key), run, seqs)) for _ in range(DEPTH)]
    await asyncio.sleep(WARM_S)
    before, first = server.cpu_s(), seen["answered"]
    await asyncio.sleep(args.seconds)
    spent, count = server.cpu_s(), seen["answered"] - first
    stop.set()
    await asyncio.gather(*loops)
    cpu_ms = {name: 1000 * (spent[name] - before[name]) / count for name in spent}
    return {"answered_per_s": count / args.seconds, "cpu_ms_per_pass": cpu_ms, "seen": dict(seen)}


async def _trained(client: Client, run: str, seq: int, seen: Counter[str]) -> None:
    """Send one forward_backward and wait for its result."""
    request = (await persist(client, "forward_backward", pass_body(run, seq, TOKENS_PER_OP), seen))["request_id"]
    await persist(client, "retrieve_future", {"request_id": request}, seen)


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


async def overload(server: LocalServer, args: Args) -> dict[str, Any]:
    """Offer FACTOR times the capacity, in an open loop, for `args.seconds`."""
    keys, seen = keys_of(TENANTS), Seen()
    rates = f"--ops-per-s={CAPACITY_PER_S}", f"--ops-per-cycle={CAPACITY_PER_S / 10:.0f}"
    server.start(keys, *rates, QUOTAS=f"ops={QUOTA_OPS}")
    runs = [await new_run(Client(server.address, key), seen.statuses) for key in keys]
    seen.statuses.clear()
    ends_at = time.monotonic() + args.seconds
    watching = asyncio.create_task(_watch(server, seen))
    await asyncio.gather(*(_offer(server, *each, ends_at, seen) for each in zip(keys, runs, strict=True)))
    watching.cancel()
    accepted, refused = len(seen.accepted_ms), len(seen.refused_ms)
    await asyncio.wait_for(asyncio.gather(*seen.answers), 60)
    events = [json.loads(line) for line in (server.folder / "api.log").read_text().splitlines() if line.startswith("{")]
    served_ms = [event["dur_ms"] for event in events if event.get("code") == 429]
    third, seconds = len(seen.api_mb) // 3, args.seconds
    kept_kb = (seen.redis_mb[-1] - seen.redis_mb[third]) * 1024
    return {
        "offered_per_s": (accepted + refused) / seconds, "capacity_per_s": CAPACITY_PER_S,
        "accepted": accepted, "refused": refused,
        "answered_of_accepted": sum(not answer.exception() for answer in seen.answers),
        "refused_p50_ms": percentile(seen.refused_ms, 0.5), "refused_p99_ms": percentile(seen.refused_ms, 0.99),
        "refused_p50_ms_in_server": percentile(served_ms, 0.5), "refused_p99_ms_in_server": percentile(served_ms, 0.99),
        "accepted_p99_ms": percentile(seen.accepted_ms, 0.99),
        "queued_ops_max": max(seen.queued_ops), "queued_ops_bound": TENANTS * QUOTA_OPS,
        "api_mb_after_a_third": seen.api_mb[third], "api_mb_at_the_end": seen.api_mb[-1],
        "redis_mb_after_a_third": seen.redis_mb[third], "redis_mb_at_the_end": seen.redis_mb[-1],
        "redis_kb_kept_per_answer": kept_kb / (CAPACITY_PER_S * seconds * 2 / 3), "seen": dict(seen.statuses),
    }  # fmt: skip


async def _offer(server: LocalServer, key: str, run: str, ends_at: float, seen: Seen) -> None:
    """Send at random times, independent of the responses; a rejected request is not sent again."""
    client, seq, due, chance = Client(server.address, key), 1, time.monotonic(), random.Random(key)
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
            result = _answered(server.address, key, answer["request_id"], seen.statuses)
            seen.answers.append(asyncio.create_task(result))
        else:
            assert status == 429, answer
            seen.refused_ms.append(took_ms)


async def _answered(address: Address, key: str, request: str, seen: Counter[str]) -> None:
    """Wait for a result on a connection of its own."""
    client = Client(address, key)
    await persist(client, "retrieve_future", {"request_id": request}, seen)
    client.close()


async def _watch(server: LocalServer, seen: Seen) -> None:
    redis = open_sync_connection(server.redis_url)
    while True:
        await asyncio.sleep(SAMPLE_S)
        names = [name for name in redis.scan_iter("*queue:*") if redis.type(name) == b"hash"]
        seen.queued_ops.append(sum(int(redis.hget(name, "ops") or 0) for name in names))
        seen.redis_mb.append(redis.info("memory")["used_memory"] / 2**20)
        seen.api_mb.append(server.rss_mb("api"))


async def burst(server: LocalServer, _: Args) -> dict[str, Any]:
    """Send large passes and many samples at once, with heartbeats of another process at the same time."""
    keys = keys_of(BURST_TENANTS)
    server.start(keys, "--ops-per-cycle=64")
    address, seen = server.address, Counter[str]()
    runs = [await new_run(Client(address, key), seen) for key in keys]
    samplers = [await _new_sampler(Client(address, key), seen) for key in keys]
    session = (await persist(Client(address, keys[0]), "create_session", {}, seen))["session_id"]
    context = get_context("spawn")
    stop = context.Manager().Event()
    loop, seen = asyncio.get_running_loop(), Counter()
    one = wire_pb2.ForwardBackwardRequest.FromString(pass_body("", 0, TOKENS))
    datums = wire_pb2.ForwardBackwardRequest(data=[one.data[0]] * DATUMS).SerializeToString()

    async def accepted(number: int, path: str, body: Body, tail: bytes = b"") -> float:
        began, client = time.perf_counter(), Client(address, keys[number % len(keys)])
        await persist(client, path, body, seen, tail)
        client.close()
        return time.perf_counter() - began

    def head(number: int) -> bytes:  # a pass before its datums, which all passes share
        run, seq = runs[number % len(keys)], 1 + number // len(keys)
        return wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy").SerializeToString()

    def sample(number: int) -> Body:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 64}]}
        sampler, seq = samplers[number % len(keys)], number // len(keys)
        return {
            "sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 16},
        }  # fmt: skip

    with ProcessPoolExecutor(1, context) as pool:
        beats = loop.run_in_executor(pool, _beat, address, keys[0], session, stop)
        await asyncio.sleep(2)
        cpu_before, began = server.cpu_s(), time.perf_counter()
        accepted_s = await asyncio.gather(
            *(accepted(at, "forward_backward", head(at), datums) for at in range(PASSES)),
            *(accepted(at, "asample", sample(at)) for at in range(SAMPLES)),
        )
        took_s, cpu_after = time.perf_counter() - began, server.cpu_s()
        stop.set()
        beat_ms = await beats
    cpu_s = {name: after - cpu_before[name] for name, after in cpu_after.items()}
    return {
        "requests": PASSES + SAMPLES, "pass_mb": len(datums) / 1e6, "all_accepted_s": took_s,
        "passes_accepted_p50_s": percentile(accepted_s[:PASSES], 0.5),
        "samples_accepted_p99_s": percentile(accepted_s[PASSES:], 0.99),
        "cpu_s": cpu_s | {"all": sum(cpu_s.values())}, "heartbeats": len(beat_ms),
        "heartbeat_p50_ms": percentile(beat_ms, 0.5), "heartbeat_p95_ms": percentile(beat_ms, 0.95), "seen": dict(seen),
    }  # fmt: skip


async def _new_sampler(client: Client, seen: Counter[str]) -> str:
    session = (await persist(client, "create_session", {}, seen))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "null"}
    made = await persist(client, "create_sampling_session", body, seen)
    return str(made["sampling_session_id"])


def _beat(address: Address, key: str, session: str, stop: Any) -> list[float]:
    """Send heartbeats until `stop` is set; return the time of each in ms."""

    async def beats() -> list[float]:
        client, took = Client(address, key), []
        while not stop.is_set():
            began = time.perf_counter()
            await persist(client, "session_heartbeat", {"session_id": session}, Counter())
            took.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(BEAT_EVERY_S)
        return took

    return asyncio.run(beats())


PARTS = {"small_passes": small_passes, "bare_passes": bare_passes, "overload": overload, "burst": burst}
OPTIONS: Options = {"parts": Some(tuple(PARTS)), "seconds": (15.0, "of all parts but burst")}
