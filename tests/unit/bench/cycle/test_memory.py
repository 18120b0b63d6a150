from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from bench.cycle.memory import Kept, SavedBytes, layer_bytes_per_token, measure_memory
from bench.support.model import build
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model.activation_checkpointing import Choice


def test_tensors_saved_for_backward_are_counted_once_until_it_has_run() -> None:
    counter, x = SavedBytes(), torch.ones(1000, requires_grad=True)

    with saved_tensors_hooks(counter.keep, lambda kept: kept.tensor):
        y = torch.exp(x)  # its backward keeps its result
        z = (y * y).sum()  # keeps the same tensor, twice
    assert counter.now == 4000

    z.backward()
    assert counter.now == 0
    assert counter.peak == 4000


def test_weights_are_not_counted() -> None:
    weight = torch.nn.Parameter(torch.ones(10))

    assert not isinstance(SavedBytes().keep(weight), Kept)


@pytest.mark.parametrize(
    ("recompute", "least", "most"), [("never", 1.0, 2.0), ("always", 0.0, 0.3)]
)
def test_the_bytes_kept_per_token_are_near_the_formula_unless_layers_are_recomputed(
    tmp_path: Path, recompute: Choice, least: float, most: float
) -> None:
    engine = Engine.load(str(build(tmp_path, "tiny")), recompute=recompute)

    row = measure_memory(engine, "tiny", torch.float32, "cpu")

    assert least < row["saved_per_token"] / row["ideal_per_token"] < most


@pytest.mark.parametrize(
    ("shape", "megabytes"),
    [((1024, 3072, 16, 28), 1.26), ((2560, 9728, 32, 36), 3.94), ((4096, 12_288, 32, 36), 4.94)],
)
def test_the_formula_gives_the_known_values_of_qwen3(
    shape: tuple[int, int, int, int], megabytes: float
) -> None:
    hidden, intermediate, heads, layers = shape
    found = layer_bytes_per_token(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        layers=layers,
    )
    assert found / 1e6 == pytest.approx(megabytes, rel=0.01)
