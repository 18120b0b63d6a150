"""Overhead of a client library per request: our client and the official SDK against plain httpx.

    python -m bench client [--requests 200] [--depth 64] [--rounds 7]

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

import asyncio
import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx

from bench.load.local_server import local_server, pass_body
from bench.load.null_worker import POOL
from bench.support.record import Args, Options, Report, table
from bench.support.serving import datum
from bench.support.timing import Took, alternate, measure, median_ratio
from cotrain import Datum, ModelInput, ServiceClient
from cotrain.wire.codec import PROTOBUF

#: Sends a number of requests, keeps a number of them in flight, and waits for all results.
Way = Callable[[int, int], None]

OPTIONS: Options = {
    "requests": (200, "of each way in each round"), "depth": (64, "requests in flight in `many`"),
    "rounds": 7, "tokens": (32, "of the one datum of a request"),
}  # fmt: skip
TABLE = {
    "requests": "{}", "client": "{}", "wall_ms": "{:.2f}", "wall_over_httpx": "{:.2f}", "wall_over_tinker": "{:.2f}",
    "cpu_ms": "{:.2f}", "cpu_over_httpx": "{:.2f}", "cpu_over_tinker": "{:.2f}",
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    os.environ["TINKER_TELEMETRY"] = "0"
    rows, rounds = report.setdefault("rows", {}), report.setdefault("rounds", {})
    opened = {"httpx": plain, "cotrain": ours, "tinker": official}
    keys = {name: f"tml-bench-key-of-{name}" for name in opened}
    with local_server() as server, ExitStack() as stack:
        server.start(list(keys.values()))
        url = "http://{}:{}".format(*server.address)
        asyncio.run(server.until_held(0))
        ways = {name: stack.enter_context(way(url, keys[name], args.tokens)) for name, way in opened.items()}
        for shape, depth in (("alone", 1), ("many", args.depth)):
            calls = {name: partial(measure, partial(way, args.requests, depth)) for name, way in ways.items()}
            took = alternate(calls, args.rounds)
            rounds[shape] = {name: [costs_ms(each, args.requests) for each in found] for name, found in took.items()}
            rows[shape] = summary(rounds[shape])
    shown = [{"requests": shape, "client": name, **row} for shape, found in rows.items() for name, row in found.items()]
    print(table(shown, TABLE))


def costs_ms(took: Took, requests: int) -> dict[str, float]:
    return {"wall": 1000 * took.wall_s / requests, "cpu": 1000 * took.cpu_s / requests}


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return medians of each way, and of its ratios to the others within a round."""
    rows: dict[str, dict[str, float]] = {name: {} for name in found}
    for (name, row), kind in itertools.product(rows.items(), ("wall", "cpu")):
        own, *others = ([cost[kind] for cost in found[each]] for each in (name, *found))
        row[f"{kind}_ms"] = statistics.median(own)
        row |= {f"{kind}_over_{other}": median_ratio(own, costs) for other, costs in zip(found, others, strict=True)}
    return rows


@contextmanager
def plain(url: str, key: str, tokens: int) -> Iterator[Way]:
    loop, seqs = asyncio.new_event_loop(), itertools.count(1)
    http = httpx.AsyncClient(
        base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60.0,
        limits=httpx.Limits(max_connections=1000, max_keepalive_connections=100),
    )  # fmt: skip

    def create(path: str, **body: Any) -> Any:
        return loop.run_until_complete(http.post(path, json=body)).json()

    session = create("create_session")["session_id"]
    lora = {"base_model": POOL.base_model, "lora_config": {"rank": 4}}
    run = create("create_model", session_id=session, model_seq_id=0, **lora)["model_id"]

    async def ask(free: asyncio.Semaphore, seq: int) -> None:
        async with free:
            body, headers = pass_body(run, seq, tokens), {"Content-Type": PROTOBUF}
            accepted = await http.post("forward_backward", content=body, headers=headers)
            asked, accept = {"request_id": accepted.json()["request_id"]}, {"Accept": PROTOBUF}
            while (await http.post("retrieve_future", json=asked, headers=accept)).status_code == 408:
                pass

    async def ask_all(count: int, depth: int) -> None:
        free = asyncio.Semaphore(depth)
        await asyncio.gather(*(ask(free, next(seqs)) for _ in range(count)))

    yield lambda count, depth: loop.run_until_complete(ask_all(count, depth))
    loop.run_until_complete(http.aclose())
    loop.close()


@contextmanager
def ours(url: str, key: str, tokens: int) -> Iterator[Way]:
    with ServiceClient(url, key) as service:
        run = service.create_lora_training_client(POOL.base_model, rank=4)
        inputs: Any = {"target_tokens": [0] * tokens, "weights": [0.0] * tokens}
        data = [Datum(model_input=ModelInput.from_ints([0] * tokens), loss_fn_inputs=inputs)]
        yield partial(keep_flying, lambda: run.forward_backward(data, "cross_entropy"))


@contextmanager
def official(url: str, key: str, tokens: int) -> Iterator[Way]:
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key=key)
    run = service.create_lora_training_client(base_model=POOL.base_model, rank=4).result()
    data = [datum([0] * (tokens + 1), tinker)]
    yield partial(keep_flying, lambda: run.forward_backward(data, "cross_entropy"))
    service.close("success")


def keep_flying(ask: Callable[[], Any], count: int, depth: int) -> None:
    """Send `count` requests; once `depth` are in flight, wait for the oldest."""
    flying: list[Any] = []
    for _ in range(count):
        if len(flying) == depth:
            flying.pop(0).result()
        flying.append(ask())
    for future in flying:
        future.result()
