"""CPU time of the host per decode step: total, and the part for which the device waits.

    python -m bench decode_host [--rows 128] [--adapters 64] [--steps 150] [--temperature 0]

The decoder runs as on a GPU, with graphs, on a device that takes no time: a graph does nothing, and only a tiny head
of the model exists. The device waits for the host from the moment when the tokens of a step are readable until the
next step starts. With overlap it does not wait if the host's total work is shorter than the device's. Both
ways are measured in alternation. A busy machine increases the figures and never reduces them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.decode import adapters_of
from bench.support.model import build
from bench.support.options import Options
from bench.support.report import Report, prepare_torch, show
from bench.support.timing import turns
from cotrain_workers.engine.decoding import cuda_kernels, model_runner, next_tokens
from cotrain_workers.engine.decoding.cuda_graphs import DecodeGraphs
from cotrain_workers.engine.decoding.decoder import EngineDecoder
from cotrain_workers.engine.decoding.kv_cache import SHARED_STEP_TOKENS
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights
from tests.support.decoding import request

PAGE, PROMPT, RANK = 256, 40, 8
WAYS = {"one after the other": False, "overlapped": True}

OPTIONS: Options = {
    "rows": 128, "adapters": 64, "tenants": (1, "that share them"), "steps": 150, "rounds": 3,
    "temperature": 0.0, "context": (40_960, "that pages have room for"),
}  # fmt: skip


class Watch:
    """CPU time of this thread between readable tokens of a step and the start of the next step."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._readable_at: float | None = None

    def begins(self) -> None:
        """Record that a step starts on a device that was idle since the last tokens became readable."""
        if self._readable_at is not None:
            self.waited_s += time.thread_time() - self._readable_at
            self._readable_at = None

    def is_readable(self, *, has_work: bool) -> None:
        """Record that the tokens of a step are readable; `has_work`: the device has another step to compute."""
        self._readable_at = None if has_work else time.thread_time()


def run(args: argparse.Namespace, report: Report) -> None:
    """Measure both ways on a tiny model."""
    prepare_torch(threads=1)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(str(build(Path(folder) / "tiny", "tiny")))
        weights = adapters_of(engine, args.adapters, RANK)
        report["steps"] = [show(row) for row in measure(engine, weights, args)]


def measure(
    engine: Engine, weights: dict[str, HostWeights], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time steps of both ways in alternation; return the minimum and median CPU time per step in ms."""
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    waited: dict[str, list[float]] = {name: [] for name in WAYS}
    for name in turns(list(WAYS), args.rounds):
        with ExitStack() as stack:
            watch = Watch()
            decoder = decoder_of(engine, weights, args, watch, stack)
            decoder.overlaps = WAYS[name]
            for each in steps(decoder, args, watch):
                took[name].append(each[0])
                waited[name].append(each[1])
    return [
        {
            "way": name,
            "rows": args.rows,
            "adapters": args.adapters,
            "tenants": args.tenants,
            "temperature": args.temperature,
            "steps": len(took[name]),
            "host_ms_least": 1e3 * min(took[name]),
            "host_ms": 1e3 * statistics.median(took[name]),
            "waited_for_ms_least": 1e3 * min(waited[name]),
            "waited_for_ms": 1e3 * statistics.median(waited[name]),
        }
        for name in WAYS
    ]


def decoder_of(
    engine: Engine,
    weights: dict[str, HostWeights],
    args: argparse.Namespace,
    watch: Watch,
    stack: ExitStack,
) -> EngineDecoder:
    """Return a decoder on a device that takes no time."""
    tokens = args.rows * 3 * PAGE
    decoder = engine.decoder(weights.__getitem__, kv_tokens=tokens, text=None, page_tokens=PAGE)
    runner, cache = decoder.runner, decoder._cache
    hidden = torch.zeros(1, engine._base.hidden_size)

    def run_model(ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden.expand(ids.shape[1], -1).contiguous()

    def record(
        work: Callable[[], torch.Tensor],
    ) -> tuple[Callable[[], None], torch.Tensor]:
        return watch.begins, work()

    decoder.scheduler._sizes = replace(decoder.scheduler._sizes, shared=SHARED_STEP_TOKENS["cuda"])
    runner._run_model = partial(run_model)
    max_pages = args.context // PAGE
    runner.graphs = DecodeGraphs(run_model, cache, max_pages, record)
    real = next_tokens.NextTokens.read

    def read(own: next_tokens.NextTokens) -> Any:
        watch.is_readable(has_work=decoder._begun is not None)
        return real(own)

    for owner, name, value in (
        (model_runner, "groups_take", lambda *_: True),
        (cuda_kernels.GroupedLora, "add", lambda *_: None),
        (next_tokens.NextTokens, "read", read),
    ):
        stack.enter_context(mock.patch.object(owner, name, value))
    return decoder


def steps(
    decoder: EngineDecoder, args: argparse.Namespace, watch: Watch
) -> list[tuple[float, float]]:
    """Start all sequences, then return CPU seconds of each later step: total, and waited for by the device."""
    rng = np.random.default_rng(0)
    for at in range(args.rows):
        adapter = at % args.adapters
        decoder.add(
            request(
                str(at),
                rng.integers(0, 128, PROMPT),
                f"t{adapter}",
                max_tokens=args.steps + 50,
                temperature=args.temperature,
                tenant=f"t{adapter % args.tenants}",
            )
        )
    while decoder.step().decoded_tokens < args.rows:
        pass
    found = []
    for at in range(args.steps + 10):
        began, waited_s = time.thread_time(), watch.waited_s
        done = decoder.step()
        assert done.decoded_tokens == args.rows
        if at >= 10:
            found.append((time.thread_time() - began, watch.waited_s - waited_s))
    for at in range(args.rows):
        decoder.cancel(str(at))
    return found
