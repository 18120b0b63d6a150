"""Longest datum that trains on a device, by counted bytes of Qwen3 shapes, without a GPU.

    python -m bench longest [--sizes 0.6b,4b,8b,32b]

The engine runs one datum of two lengths on a CUDA device without values (`tests/support/fake_cuda.py`, which needs a C++
compiler), with two and with three layers. Its peak is a line in tokens and layers. The device's memory is divided as by
the engine (`training/memory_model.py`). The workspaces of FlashAttention and cuBLAS are not counted, except in the margin.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from bench.support.fake_engine import BF16, FakeEngine, a_pass, begin, on_fake_device, run_on_fake_cuda
from bench.support.model import SHAPES, Shape
from bench.support.record import Args, Options, Report, show
from cotrain_workers.engine import engine as engine_module
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Failure
from cotrain_workers.engine.training.memory_model import micro_batch_bytes
from cotrain_workers.engine.training.micro_batches import Budget

#: Tokens of the two data, and layers of the two models. More than a micro-batch of 1,024 and than one chunk of an MLP.
LENGTHS, LAYERS, MICRO_BATCH = (16_384, 32_768), (2, 3), 1024
DEVICES = {"24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9, "141 GB": 141e9}
OPTIONS: Options = {
    "sizes": ["0.6b", "4b", "8b", "32b"], "rank": 16, "backend": "fused",
}  # fmt: skip


def run(settings: Args, _: Report) -> int:
    def count() -> None:
        for row in rows(settings):
            show(row)

    return run_on_fake_cuda(count)


def rows(settings: Args) -> Iterator[dict[str, Any]]:
    """Yield the bytes of a token and the longest datum of each device, for each base model."""
    for size in settings.sizes:
        shape, found = SHAPES[size], {}
        values = shape.layers * sum(a * b for a, b in shape.linears) + 2 * shape.vocab * shape.hidden
        for name, save in (("recomputed", sys.maxsize), ("saving", 0)):
            fixed, slope = line(shape, settings, save)
            found[f"{name}_kb_per_token"] = slope / 1e3
            for device, total in DEVICES.items():
                free = micro_batch_bytes(int(total), values * BF16.itemsize, 0)
                found[f"{name} {device}"] = max(0, int((free - fixed) // slope))
        yield {"size": size, **found, "host_kb_per_token": shape.layers * shape.hidden * BF16.itemsize / 1e3}


def line(shape: Shape, settings: Args, save: int) -> tuple[float, float]:
    """Return the fixed bytes of a datum, and its bytes per token, with all layers of the model."""
    few, many = ([peak(shape, layers, length, settings, save) for length in LENGTHS] for layers in LAYERS)
    slopes = [(each[1] - each[0]) / (LENGTHS[1] - LENGTHS[0]) for each in (few, many)]
    fixed = [each[0] - slope * LENGTHS[0] for each, slope in zip((few, many), slopes, strict=True)]
    more = shape.layers - LAYERS[0]
    return tuple(one + more * (two - one) for one, two in (fixed, slopes))  # type: ignore[return-value]  # two of them


def peak(shape: Shape, layers: int, length: int, settings: Args, save: int) -> int:
    """Return the peak bytes of a pass above an idle engine, for a datum that saves memory above `save` tokens."""
    own = Args(tenants=1, length=MICRO_BATCH, backend=settings.backend)
    fake = FakeEngine(shape, layers, own, recomputes=True)

    def work(engine: Engine) -> None:
        begin(engine, fake, ["r"], settings.rank)
        with fake.log:
            found = engine.run([a_pass("r", length)])
        assert not isinstance(found.outputs["r", 1], Failure), found.outputs

    sized = Budget(MICRO_BATCH, 0, save_tokens=save)
    with mock.patch.object(engine_module, "size_micro_batches", return_value=sized):
        on_fake_device(fake, work)
    return fake.log.peak
