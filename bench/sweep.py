"""Sweep of K runs: time against one run with the same tokens, bytes sent, and successive halving.

    python -m bench sweep [--trials 16] [--batch 2] [--steps 4] [--batches 16]

It starts `cotrain serve` on a small random model. Times are measured in alternation. On a busy machine the processor
times of all processes are the better figures. Bytes are those of the bodies of requests, not compressed, as to a server
on the same host. Polls for results are counted apart: each result of each run is polled, in a sweep or not.

* (a) time of a step of K runs over one batch of B sequences, over that of one run with K*B sequences
* (b) bytes sent for a step of the sweep, over those of K runs with requests of their own
* (c) time of K runs with requests of their own over all batches, over that of a sweep with successive halving
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx
from typing_extensions import override

import cotrain
from bench.support.processes import cpu_by_role
from bench.support.record import Args, Options, Report, show
from bench.support.serving import Load, drive, random_data, small_server
from bench.support.timing import alternate, median_ratio

OPTIONS: Options = {
    "trials": 16, "batch": 2, "length": 128, "rank": 8, "steps": 4, "repeats": 3, "batches": 16,
    "halve_after": 1, "threads": 2,
}  # fmt: skip


class Counted(httpx.AsyncHTTPTransport):
    """Network that counts the bytes of requests that carry data or steps, and of polls for results."""

    sent = polled = 0

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith(("sweep_pass", "forward_backward", "optim_step")):
            self.sent += len(request.content)
        elif request.url.path.endswith("retrieve_future"):
            self.polled += len(request.content)
        return await super().handle_async_request(request)


class Spent(NamedTuple):
    """Wall time in s, CPU time of all processes in s, bytes sent, and bytes of polls."""

    wall_s: float
    cpu_s: float
    sent: int
    polled: int


def run(args: Args, report: Report) -> None:
    network = Counted()
    with small_server(args, 1) as server, cotrain.ServiceClient(server.url, server.keys[0], network=network) as service:
        report |= show(steps(args, service, network))
        report |= show(halving(args, service, network))


def spent(network: Counted, work: Callable[[], object]) -> Spent:
    sent, polled = network.sent, network.polled
    began, before = time.perf_counter(), cpu_by_role()
    work()
    cpu_s = sum(cpu_by_role().values()) - sum(before.values())
    return Spent(time.perf_counter() - began, cpu_s, network.sent - sent, network.polled - polled)


def steps(args: Args, service: cotrain.ServiceClient, network: Counted) -> dict[str, Any]:
    """Measure steps of the sweep, and of one run with the same tokens."""
    data = random_data(args.batch, args.length, 0)
    sweep = service.create_sweep("bench", settings(args))
    one = Load(lone(args, service, 0), random_data(args.trials * args.batch, args.length, 1))
    works: dict[str, Callable[[], object]] = {
        "sweep": partial(trained, sweep, [data] * args.steps),
        "one": partial(drive, [one], args.steps),
    }
    found = alternate({name: partial(spent, network, work) for name, work in works.items()}, args.repeats)
    sweep.close()
    one.run.unload()
    sweeps, ones = found["sweep"], found["one"]
    return {
        "sweep_s_per_step": statistics.median(each.wall_s for each in sweeps) / args.steps,
        "sweep_over_one": median_ratio(*([e.wall_s for e in each] for each in (sweeps, ones))),
        "sweep_over_one_cpu": median_ratio(*([e.cpu_s for e in each] for each in (sweeps, ones))),
        "sweep_bytes_per_step": sweeps[-1].sent / args.steps,
        "sweep_poll_bytes_per_step": sweeps[-1].polled / args.steps,
    }


def halving(args: Args, service: cotrain.ServiceClient, network: Counted) -> dict[str, Any]:
    """Measure successive halving against all runs over all batches, at once and with requests of their own."""
    batches = [random_data(args.batch, args.length, number) for number in range(args.batches)]
    sweep = service.create_sweep("bench", settings(args))
    halved = spent(network, lambda: sweep.halve(batches, steps=args.halve_after))
    sweep.close()
    many = [Load(lone(args, service, at), batches[0]) for at in range(args.trials)]
    separate = spent(network, lambda: drive(many, args.batches))
    return {
        "halving_s": halved.wall_s, "separate_over_halving": separate.wall_s / halved.wall_s,
        "separate_over_halving_cpu": separate.cpu_s / halved.cpu_s,
        "separate_bytes_per_step": separate.sent / args.batches,
        "separate_poll_bytes_per_step": separate.polled / args.batches,
    }  # fmt: skip


def trained(sweep: cotrain.Sweep[Any], batches: Sequence[list[Any]]) -> None:
    sent: list[Any] = []
    for batch in batches:
        if len(sent) == 2:
            sent.pop(0).result()
        sent.append(sweep.train(batch))
    for step in sent:
        step.result()


def settings(args: Args) -> list[dict[str, float]]:
    """Return the settings of the trials, which differ in the learning rate."""
    return [{"rank": args.rank, "lr": 10 ** (-5 + at / 8)} for at in range(args.trials)]


def lone(args: Args, service: cotrain.ServiceClient, seed: int) -> Any:
    return service.create_lora_training_client("bench", rank=args.rank, seed=seed)
