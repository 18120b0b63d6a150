from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.adapters.interpolation import mix, mixed_spec
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout
from tests.support.training import PeftOracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cotrain_workers.engine.engine import Engine

    NewEngine = Callable[..., Engine]

TARGETS = (
    Target("q", "attn", 6, 10),
    Target("up", "mlp", 6, 9),
    Target("head", "unembed", 6, 20),
)


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, TARGETS)


def adapter(
    spec: AdapterSpec, layout_of: Callable[[AdapterSpec], Layout] = layout_of
) -> HostWeights:
    layout = layout_of(spec)
    weights = HostWeights(spec, torch.zeros(layout.size))
    generator = torch.Generator().manual_seed(spec.seed)
    for pair in layout.views(weights.flat).values():
        for matrix in pair:
            matrix.copy_(torch.randn(matrix.shape, generator=generator) / matrix.shape[0] ** 0.5)
    return weights


def change(weights: HostWeights, name: str, target: Target) -> torch.Tensor:
    """Return what the adapter adds to a module's weight, fp64."""
    pair = layout_of(weights.spec).views(weights.flat).get(name)
    if pair is None:
        return torch.zeros(target.outputs, target.inputs, dtype=torch.float64)
    return weights.spec.scale * (pair.b.double() @ pair.a.double())


def test_the_change_of_a_mix_is_the_sum_of_the_changes() -> None:
    sources = [
        (0.75, adapter(AdapterSpec(4, 1))),
        (-2.0, adapter(AdapterSpec(3, 2, train_mlp=False))),
        (0.5, adapter(AdapterSpec(1, 3, train_attn=False, train_unembed=False, alpha=7.5))),
    ]

    mixed = mix(sources, layout_of)

    assert mixed.spec.rank == 8
    for target in TARGETS:
        expected = torch.stack([c * change(w, target.name, target) for c, w in sources]).sum(0)
        ours = change(mixed, target.name, target)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)  # fp32 weights


def test_one_source_with_coefficient_one_is_itself_to_the_bit() -> None:
    source = adapter(AdapterSpec(5, 7, train_mlp=False, alpha=12.0))

    mixed = mix([(1.0, source)], layout_of)

    assert mixed.spec == source.spec
    assert torch.equal(mixed.flat, source.flat)


def test_a_mix_trains_whatever_a_source_does_and_has_one_scale() -> None:
    spec = mixed_spec(
        [
            AdapterSpec(4, 9, train_attn=False, train_mlp=False),
            AdapterSpec(2, 1, train_mlp=False, train_unembed=False, alpha=8.0),
        ]
    )

    assert spec == AdapterSpec(6, 9, train_mlp=False, alpha=32.0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_of_a_mix_are_those_of_plain_peft_with_the_summed_weights(
    new_engine: NewEngine, model_folder: Callable[..., Path], *, tied: bool
) -> None:
    """PEFT gets each source as an adapter; its linear layers are then merged by hand."""
    engine, folder = new_engine(tied=tied), model_folder(tied=tied)
    sources = [
        (0.6, adapter(AdapterSpec(4, 1), engine.adapters.layout_of)),
        (0.7, adapter(AdapterSpec(2, 2, train_mlp=False), engine.adapters.layout_of)),
    ]
    mixed = mix(sources, engine.adapters.layout_of)
    tokens = np.random.default_rng(0).integers(0, 128, 20)

    ours = logits(folder, [(1.0, mixed)], engine, tokens)
    expected = logits(folder, sources, engine, tokens)

    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def logits(
    folder: Path, sources: list[tuple[float, HostWeights]], engine: Engine, tokens: np.ndarray
) -> torch.Tensor:
    """Return the logits of plain PEFT with `sum c_i * change_i` in fp64, in one adapter's place."""
    widest = mixed_spec([weights.spec for _, weights in sources])
    oracle = PeftOracle(folder, widest, torch.float64)
    deltas: dict[str, torch.Tensor] = {}
    for coefficient, weights in sources:
        for name, pair in engine.adapters.layout_of(weights.spec).views(weights.flat).items():
            delta = coefficient * weights.spec.scale * (pair.b.double() @ pair.a.double())
            deltas[name] = deltas.get(name, torch.zeros_like(delta)) + delta
    modules: dict[str, Any] = dict(oracle.model.named_modules())
    hooks = []
    for name, delta in deltas.items():
        module = modules[f"base_model.model.{name}"]
        hooks.append(
            module.register_forward_hook(
                lambda _, args, out, delta=delta: out + args[0] @ delta.t()
            )
        )
    with torch.no_grad():
        found: torch.Tensor = oracle.model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    return found
