"""Overhead of a client library per request: our client and the official SDK against plain httpx.

    python -m bench.client [--requests 200] [--depth 64] [--rounds 7] [--out bench/results]

A real server with a worker that computes nothing (`bench.load`), each part in its own process. This process sends
the same forward_backward and fetches its result in three ways, in alternation:

* httpx: one POST for the request and one for its result, as bytes; nothing is encoded or parsed
* cotrain: our client, from Python lists to a `ForwardBackwardOutput`
* tinker: the official SDK, the same

Figures:

* alone: one request after another, milliseconds from each request to its result (p50)
* many: `--depth` in flight, milliseconds per request
* CPU: processor time of this process per request (ms), the cost of the library; wall times include the server

A figure is the median over the rounds. A ratio is the median of the ratios within each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from bench.load.http import pass_body
from bench.load.local_server import local_server
from bench.load.null_worker import POOL
from cotrain import Datum, ModelInput, ServiceClient
from cotrain.wire.pass_codec import PROTOBUF

#: Sends a number of requests, keeps a number of them in flight, and waits for all results.
Way = Callable[[int, int], None]

KEYS = {name: f"tml-bench-key-of-{name}" for name in ("httpx", "cotrain", "tinker")}
SHAPES = ("alone", "many")


@dataclass(frozen=True)
class Cost:
    """Cost of one request in ms."""

    wall_ms: float
    cpu_ms: float


def main() -> None:
    args = parse()
    os.environ["TINKER_TELEMETRY"] = "0"
    with local_server() as server, ExitStack() as stack:
        server.start_scheduler()
        server.start_worker()
        server.start_api(list(KEYS.values()))
        url = "http://{}:{}".format(*server.address)
        wait_for(url)
        ways = {
            name: stack.enter_context(way(url, KEYS[name], args.tokens))
            for name, way in {"httpx": plain, "cotrain": ours, "tinker": official}.items()
        }
        load_before = os.getloadavg()[0]
        rounds = {
            "alone": alternate(ways, args.requests, depth=1, rounds=args.rounds),
            "many": alternate(ways, args.requests, depth=args.depth, rounds=args.rounds),
        }
    rows = {shape: summary(rounds[shape]) for shape in SHAPES}
    show(rows)
    command = " ".join(["python -m bench.client", *sys.argv[1:]])
    report = {"command": command, "date": datetime.now(UTC).isoformat(), "machine": machine(),
              "shape": vars(args), "load_before": load_before, "load_after": os.getloadavg()[0],
              "rows": rows,
              "rounds": {shape: [{name: vars(cost) for name, cost in each.items()}
                                 for each in rounds[shape]] for shape in SHAPES}}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"client-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(f"wrote {path}")


def alternate(
    ways: dict[str, Way], requests: int, *, depth: int, rounds: int
) -> list[dict[str, Cost]]:
    """Warm up every way, then measure all of them in each round."""
    for way in ways.values():
        way(max(depth, requests // 10), depth)
    return [
        {name: measure(way, requests, depth) for name, way in ways.items()} for _ in range(rounds)
    ]


def measure(way: Way, requests: int, depth: int) -> Cost:
    """Return the cost per request of one way."""
    cpu, wall = time.process_time(), time.perf_counter()
    way(requests, depth)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return Cost(1000 * wall_s / requests, 1000 * cpu_s / requests)


def summary(rounds: Sequence[dict[str, Cost]]) -> dict[str, dict[str, float]]:
    """Return medians of each way, and of its ratios to the others within a round."""
    return {
        name: {
            "wall_ms": statistics.median(each[name].wall_ms for each in rounds),
            "cpu_ms": statistics.median(each[name].cpu_ms for each in rounds),
            **{
                f"{what}_over_{other}": statistics.median(
                    getattr(each[name], f"{what}_ms") / getattr(each[other], f"{what}_ms")
                    for each in rounds
                )
                for other in rounds[0]
                for what in ("wall", "cpu")
            },
        }
        for name in rounds[0]
    }


def show(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the table of `docs/develop/benchmarks.md`."""
    print(
        "| requests | client | wall, ms | over httpx | over tinker | CPU, ms | over httpx | over tinker |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for shape, row in rows.items():
        for name, cost in row.items():
            columns = [
                f"{cost['wall_ms']:.2f}", f"{cost['wall_over_httpx']:.2f}",
                f"{cost['wall_over_tinker']:.2f}", f"{cost['cpu_ms']:.2f}",
                f"{cost['cpu_over_httpx']:.2f}", f"{cost['cpu_over_tinker']:.2f}",
            ]  # fmt: skip
            print(f"| {shape} | {name} | {' | '.join(columns)} |")


@contextmanager
def plain(url: str, key: str, tokens: int) -> Iterator[Way]:
    """Yield a way that sends prepared bytes and receives bytes."""
    loop = asyncio.new_event_loop()
    http = httpx.AsyncClient(
        base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60.0,
        limits=httpx.Limits(max_connections=1000, max_keepalive_connections=100),
    )  # fmt: skip
    session = loop.run_until_complete(http.post("create_session", json={})).json()["session_id"]
    lora = {"session_id": session, "model_seq_id": 0, "base_model": POOL.base_model,
            "lora_config": {"rank": 4}}  # fmt: skip
    run = loop.run_until_complete(http.post("create_model", json=lora)).json()["model_id"]
    sent = 0

    async def ask(seq: int) -> None:
        headers = {"Content-Type": PROTOBUF}
        accepted = await http.post(
            "forward_backward", content=pass_body(run, seq, tokens), headers=headers
        )
        asked = {"request_id": accepted.json()["request_id"]}
        accept = {"Accept": PROTOBUF}
        while (await http.post("retrieve_future", json=asked, headers=accept)).status_code == 408:
            pass

    async def ask_all(count: int, depth: int) -> None:
        nonlocal sent
        free = asyncio.Semaphore(depth)

        async def one(seq: int) -> None:
            try:
                await ask(seq)
            finally:
                free.release()

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await free.acquire()
                sent += 1
                group.create_task(one(sent))

    yield lambda count, depth: loop.run_until_complete(ask_all(count, depth))
    loop.run_until_complete(http.aclose())
    loop.close()


@contextmanager
def ours(url: str, key: str, tokens: int) -> Iterator[Way]:
    """Yield a way that uses our client from this thread."""
    with ServiceClient(url, key) as service:
        run = service.create_lora_training_client(POOL.base_model, rank=4)
        inputs: Any = {"target_tokens": [0] * tokens, "weights": [0.0] * tokens}
        datum = Datum(model_input=ModelInput.from_ints([0] * tokens), loss_fn_inputs=inputs)
        yield lambda count, depth: keep_flying(
            count, depth, lambda: run.forward_backward([datum], "cross_entropy")
        )


@contextmanager
def official(url: str, key: str, tokens: int) -> Iterator[Way]:
    """Yield a way that uses the official SDK from this thread."""
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key=key)
    run = service.create_lora_training_client(base_model=POOL.base_model, rank=4).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([0] * tokens),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=[0] * tokens, dtype="int64", shape=[tokens]),
            "weights": tinker.TensorData(data=[0.0] * tokens, dtype="float32", shape=[tokens]),
        },
    )
    yield lambda count, depth: keep_flying(
        count, depth, lambda: run.forward_backward([datum], "cross_entropy")
    )
    service.close("success")


def keep_flying(count: int, depth: int, ask: Callable[[], Any]) -> None:
    """Send `count` requests; once `depth` are in flight, wait for the oldest."""
    flying: list[Any] = []
    for _ in range(count):
        if len(flying) == depth:
            flying.pop(0).result()
        flying.append(ask())
    for future in flying:
        future.result()


def wait_for(url: str) -> None:
    """Wait until the server responds."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/healthz", timeout=1.0).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise RuntimeError("the server did not come up")


def machine() -> dict[str, Any]:
    """Return facts about this machine and its packages."""
    packages = ("httpx", "httpcore", "pydantic", "protobuf", "tinker")
    return {"cpus": os.cpu_count(), "platform": platform.platform(),
            "python": platform.python_version(), **{name: version(name) for name in packages}}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200, help="of each way in each round")
    parser.add_argument("--depth", type=int, default=64, help="requests in flight in `many`")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32, help="of the one datum of a request")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
