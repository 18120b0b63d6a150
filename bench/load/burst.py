"""Burst: large passes and many samples at once, with heartbeats of another process at the same time."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from bench.load.local_server import Client, LocalServer, keys_of, local_server, new_run, pass_body, persist
from bench.support.timing import percentile
from cotrain.wire.proto import wire_pb2

TENANTS = 16
PASSES, SAMPLES = 208, 512
#: Datums of 1,024 tokens of 16 bytes each: 3.3 MB.
DATUMS, TOKENS = 201, 1_024
BEAT_EVERY_S = 0.02


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests at once. Return the time until the last is accepted, and the times of heartbeats."""
    del args
    keys = keys_of(TENANTS)
    with local_server() as server:
        server.start(keys, "--ops-per-cycle=64")
        return asyncio.run(_measure(server, keys))


async def _measure(server: LocalServer, keys: list[str]) -> dict[str, Any]:
    address, seen = server.address, Counter[str]()
    runs = [await new_run(Client(address, key), seen) for key in keys]
    samplers = [await _new_sampler(Client(address, key), seen) for key in keys]
    session = (await persist(Client(address, keys[0]), "create_session", {}, seen))["session_id"]
    context = get_context("spawn")
    stop = context.Manager().Event()
    loop, seen = asyncio.get_running_loop(), Counter()
    datums = shared_datums()
    with ProcessPoolExecutor(1, context) as pool:
        beats = loop.run_in_executor(pool, _beat, address, keys[0], session, stop)
        await asyncio.sleep(2)
        cpu_before, began = server.cpu_s(), time.perf_counter()
        accepted = await asyncio.gather(
            *(
                _accepted(address, keys[at % TENANTS], "forward_backward",
                          head(runs[at % TENANTS], 1 + at // TENANTS), seen, datums)
                for at in range(PASSES)
            ),
            *(
                _accepted(address, keys[at % TENANTS], "asample",
                          _sample(samplers[at % TENANTS], at // TENANTS), seen)
                for at in range(SAMPLES)
            ),
        )  # fmt: skip
        took_s, cpu_after = time.perf_counter() - began, server.cpu_s()
        stop.set()
        beat_ms = await beats
    cpu_s = {name: after - cpu_before[name] for name, after in cpu_after.items()}
    return {
        "requests": PASSES + SAMPLES, "pass_mb": len(datums) / 1e6, "all_accepted_s": took_s,
        "passes_accepted_p50_s": percentile(accepted[:PASSES], 0.5),
        "samples_accepted_p99_s": percentile(accepted[PASSES:], 0.99),
        "cpu_s": cpu_s | {"all": sum(cpu_s.values())}, "heartbeats": len(beat_ms),
        "heartbeat_p50_ms": percentile(beat_ms, 0.5), "heartbeat_p95_ms": percentile(beat_ms, 0.95), "seen": dict(seen),
    }  # fmt: skip


async def _new_sampler(client: Client, seen: Counter[str]) -> str:
    session = (await persist(client, "create_session", {}, seen))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "null"}
    made = await persist(client, "create_sampling_session", body, seen)
    return str(made["sampling_session_id"])


async def _accepted(
    address: tuple[str, int], key: str, path: str, body: Any, seen: Counter[str], tail: bytes = b""
) -> float:
    began, client = time.perf_counter(), Client(address, key)
    await persist(client, path, body, seen, tail)
    client.close()
    return time.perf_counter() - began


def head(run: str, seq: int) -> bytes:
    """Return the start of a pass, before its datums."""
    return wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy").SerializeToString()


def shared_datums() -> bytes:
    """Return the rest of every pass: DATUMS datums."""
    one = wire_pb2.ForwardBackwardRequest.FromString(pass_body("", 0, TOKENS))
    return wire_pb2.ForwardBackwardRequest(data=[one.data[0]] * DATUMS).SerializeToString()


def _sample(sampler: str, seq: int) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 64}]}
    return {
        "sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 16},
    }  # fmt: skip


def _beat(address: tuple[str, int], key: str, session: str, stop: Any) -> list[float]:
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
