"""Longest datum that trains on a device, by counted bytes of Qwen3 shapes, without a GPU.

    python -m bench longest [--sizes 0.6b,4b,8b,32b] [--json]

The engine runs one datum of two lengths on a CUDA device without values (`tests/support/fake_cuda.py`, which needs a C++
compiler), with two and with three layers. Its peak is a line in tokens and layers. The device's memory is divided as by
the engine (`training/memory_model.py`). The workspaces of FlashAttention and cuBLAS are not counted, except in the margin.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from bench.support.fake_engine import BF16, FakeEngine, on_fake_device, run_on_fake_cuda
from bench.support.model import SHAPES, Shape
from bench.support.record import Options, Report
from cotrain_workers.engine import engine as engine_module
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Datum, Failure, Pass
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.memory_model import Budget, micro_batch_bytes

#: Tokens of the two data, and layers of the two models. More than a micro-batch of 1,024 and than one chunk of an MLP.
LENGTHS, LAYERS, MICRO_BATCH = (16_384, 32_768), (2, 3), 1024
DEVICES = {"24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9, "141 GB": 141e9}

OPTIONS: Options = {
    "sizes": ["0.6b", "4b", "8b", "32b"], "rank": 16, "backend": "fused",
    "json": (False, "print JSON"),
}  # fmt: skip


def peak(shape: Shape, layers: int, length: int, settings: argparse.Namespace, save: int) -> int:
    """Return the peak bytes of a pass above an idle engine, for a datum that saves memory above `save` tokens."""
    own = argparse.Namespace(tenants=1, length=MICRO_BATCH, recompute=True, plain=False, backend=settings.backend)
    fake = FakeEngine(shape, layers, own)
    ids = np.zeros(length, np.int64)
    datum = Datum(ids, {"target_tokens": ids, "weights": np.ones(length, np.float32)})

    def work(engine: Engine) -> None:
        engine.run([Create("r", 0, AdapterSpec(settings.rank, seed=0))])
        _ = engine.adapters["r"].gradient  # as from the second cycle on
        with fake.log:
            found = engine.run([Pass("r", 1, [datum], "cross_entropy", {}, True)])
        assert not isinstance(found.outputs["r", 1], Failure), found.outputs

    sized = Budget(MICRO_BATCH, 0, save_tokens=save)
    with mock.patch.object(engine_module, "size_micro_batches", return_value=sized):
        on_fake_device(fake, work)
    return fake.log.peak


def line(shape: Shape, settings: argparse.Namespace, save: int) -> tuple[float, float]:
    """Return the fixed bytes of a datum, and its bytes per token, with all layers of the model."""
    few, many = ([peak(shape, layers, length, settings, save) for length in LENGTHS] for layers in LAYERS)
    slopes = [(each[1] - each[0]) / (LENGTHS[1] - LENGTHS[0]) for each in (few, many)]
    fixed = [each[0] - slope * LENGTHS[0] for each, slope in zip((few, many), slopes, strict=True)]
    more = shape.layers - LAYERS[0]
    return tuple(one + more * (two - one) for one, two in (fixed, slopes))  # type: ignore[return-value]  # two of them


def weight_bytes(shape: Shape) -> int:
    """Return the bytes of a base model without its norms."""
    values = shape.layers * sum(a * b for a, b in shape.linears) + 2 * shape.vocab * shape.hidden
    return values * BF16.itemsize


def rows(settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the bytes of a token and the longest datum of each device, for each base model."""
    for size in settings.sizes:
        shape, found = SHAPES[size], {}
        for name, save in (("recomputed", sys.maxsize), ("saving", 0)):
            fixed, slope = line(shape, settings, save)
            found[f"{name}_kb_per_token"] = slope / 1e3
            for device, total in DEVICES.items():
                free = micro_batch_bytes(int(total), weight_bytes(shape), 0)
                found[f"{name} {device}"] = max(0, int((free - fixed) // slope))
        host = shape.layers * shape.hidden * BF16.itemsize / 1e3
        yield {"size": size, **found, "host_kb_per_token": host}


def run(settings: argparse.Namespace, _: Report) -> int:
    """Count, and print the counts."""

    def count() -> None:
        for row in rows(settings):
            plain = "  ".join(f"{name} {value}" for name, value in row.items())
            print(json.dumps(row) if settings.json else plain)

    return run_on_fake_cuda(count)
