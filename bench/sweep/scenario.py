"""Sweep of K runs: time against one run with the same tokens, bytes sent, and successive halving.

    python -m bench sweep [--trials 16] [--batch 2] [--steps 4] [--batches 16]

It starts `cotrain serve` on a small random model. Times are measured in alternation, and bytes are those of the
requests before TCP.

* (a) time of a step of K runs over one batch of B sequences, over that of one run with K*B sequences
* (b) bytes sent for a step of the sweep, over those of K runs with requests of their own
* (c) time of K runs with requests of their own over all batches, over that of a sweep with successive halving
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from typing_extensions import override

import cotrain
from bench.support.model import VOCAB, build
from bench.support.options import Options
from bench.support.report import Report, show
from bench.support.serving import Load, datum, drive, serving
from bench.support.timing import alternate, median_ratio

KEY = "tml-bench-000000000000"
OPTIONS: Options = {
    "trials": 16, "batch": 2, "length": 128, "rank": 8, "steps": 4, "repeats": 3, "batches": 16,
    "halve_after": 1, "threads": 2,
}  # fmt: skip


class Counted(httpx.AsyncHTTPTransport):
    """Network that counts the bytes of requests that carry data or steps."""

    sent = 0

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and count it."""
        if request.url.path.endswith(("sweep_pass", "forward_backward", "optim_step")):
            self.sent += len(request.content)
        return await super().handle_async_request(request)


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure all three."""
    network = Counted()
    with tempfile.TemporaryDirectory(prefix="cotrain-bench-") as scratch, ExitStack() as stack:
        model = build(Path(scratch) / "model")
        url = stack.enter_context(serving(model, Path(scratch) / "data", [KEY], args.threads))
        service = stack.enter_context(cotrain.ServiceClient(url, KEY, network=network))
        report |= show(steps(args, service, network))
        report |= show(halving(args, service))


def steps(
    args: argparse.Namespace, service: cotrain.ServiceClient, network: Counted
) -> dict[str, Any]:
    """Measure the time and the bytes of a step."""
    data = sequences(args, 0, args.batch)
    sweep = service.create_sweep("bench", settings(args))
    one = Load(lone(args, service, 0), sequences(args, 1, args.trials * args.batch))
    many = [Load(lone(args, service, at), data) for at in range(args.trials)]

    def sent_by(work: Any) -> tuple[float, float]:
        before = network.sent
        return work(), (network.sent - before) / args.steps

    found = alternate(
        {
            "sweep": partial(sent_by, partial(trained, sweep, [data] * args.steps)),
            "one": partial(sent_by, partial(drive, [one], args.steps)),
            "many": partial(sent_by, partial(drive, many, args.steps)),
        },
        args.repeats,
    )
    times = {way: [each[0] for each in rounds] for way, rounds in found.items()}
    sent = {way: statistics.median(each[1] for each in rounds) for way, rounds in found.items()}
    sweep.close()
    for load in (one, *many):
        load.run.unload()
    return {
        "sweep_s_per_step": statistics.median(times["sweep"]),
        "one_s_per_step": statistics.median(times["one"]),
        "sweep_over_one": median_ratio(times["sweep"], times["one"]),
        "sweep_over_many": median_ratio(times["sweep"], times["many"]),
        "sweep_bytes": sent["sweep"],
        "many_bytes": sent["many"],
        "many_over_sweep_bytes": sent["many"] / sent["sweep"],
    }


def halving(args: argparse.Namespace, service: cotrain.ServiceClient) -> dict[str, Any]:
    """Measure successive halving against all runs over all batches, at once and with requests of their own."""
    batches = [sequences(args, number, args.batch) for number in range(args.batches)]
    sweep = service.create_sweep("bench", settings(args))
    began = time.perf_counter()
    sweep.halve(batches, steps=args.halve_after)
    halved_s = time.perf_counter() - began
    sweep.close()
    many = [Load(lone(args, service, at), batches[0]) for at in range(args.trials)]
    separate_s = drive(many, args.batches) * args.batches
    return {
        "halving_s": halved_s,
        "separate_s": separate_s,
        "separate_over_halving": separate_s / halved_s,
    }


def trained(sweep: cotrain.Sweep[Any], batches: Sequence[list[Any]]) -> float:
    """Train with two steps in flight; return seconds per step."""
    began = time.perf_counter()
    sent = [sweep.train(batch) for batch in batches[:2]]
    for batch in [*batches[2:], None, None][: len(batches)]:
        sent.pop(0).result()
        if batch is not None:
            sent.append(sweep.train(batch))
    return (time.perf_counter() - began) / len(batches)


def settings(args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the settings of the trials, which differ in the learning rate."""
    return [{"rank": args.rank, "lr": 10 ** (-5 + at / 8)} for at in range(args.trials)]


def lone(args: argparse.Namespace, service: cotrain.ServiceClient, seed: int) -> Any:
    """Return a run with requests of its own."""
    return service.create_lora_training_client("bench", rank=args.rank, seed=seed)


def sequences(args: argparse.Namespace, seed: int, count: int) -> list[Any]:
    """Return random datums."""
    rng = np.random.default_rng(seed)
    return [datum(row) for row in rng.integers(0, VOCAB, (count, args.length + 1)).tolist()]
