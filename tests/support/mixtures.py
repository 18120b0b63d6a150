"""Plain transformers with the effective weights of an adapter, as an oracle for mixtures of experts.

PEFT adapts the experts' gate and up as one matrix, and shares no matrix among experts. Here each weight is
`W + scale * B @ A` of the matrices of our layout, with gradients by autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from typing_extensions import override

from cotrain_workers.engine.adapters.adapter import initial_weights
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights, Load, LoadOutput
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair
from tests.support.shared_base import load_plain
from tests.support.training import PeftOracle

#: Families that differ most: shared experts, transposed and interleaved weights with biases, latent attention.
SOME = ("qwen2_moe", "gpt_oss", "deepseek_v3")


class EagerOracle(PeftOracle):
    """The eager experts of transformers and `torch.optim.AdamW` on one adapter, one sequence at a time."""

    def __init__(self, folder: Path, spec: AdapterSpec, dtype: torch.dtype) -> None:
        self.network = load_plain(folder, dtype)
        self.network.set_experts_implementation("eager")
        self.model = Effective(self)
        self.dtype, self.device = dtype, "cpu"
        self._scale = spec.scale
        self.pairs: dict[str, Pair] = {}

    @override
    def load(self, layout: Layout, arena: torch.Tensor) -> None:
        self.pairs = {
            name: Pair(*(torch.nn.Parameter(each.to(self.dtype, copy=True)) for each in pair))
            for name, pair in layout.views(arena).items()
        }

    @override
    def parameters(self) -> list[torch.nn.Parameter]:
        pairs = self.pairs.values()
        return [each for pair in pairs for each in pair if isinstance(each, torch.nn.Parameter)]

    @override
    def arena(self, layout: Layout, *, grads: bool) -> torch.Tensor:
        flat = torch.zeros(layout.size, dtype=self.dtype)
        for name, pair in layout.views(flat).items():
            for ours, theirs in zip(pair, self.pairs[name], strict=True):
                found = theirs.grad if grads else theirs.detach()
                assert found is not None
                ours.copy_(found)
        return flat

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the effective weights by parameter."""
        known: dict[str, torch.Tensor] = dict(self.network.named_parameters())
        found: dict[str, torch.Tensor] = {}
        for name, (a, b) in self.pairs.items():
            change = self._scale * b @ a  # of experts [experts, out, in]
            module, _, product = name.rpartition(".")
            if not module.endswith(".experts"):
                found[f"{name}.weight"] = known[f"{name}.weight"] + change
                continue
            fused = f"{module}.{'down_proj' if product == 'down_proj' else 'gate_up_proj'}"
            found[fused] = self._with(fused, found[fused] if fused in found else known[fused], change, product)
        return found

    def _with(self, name: str, weight: torch.Tensor, change: torch.Tensor, product: str) -> torch.Tensor:
        """Return the fused weight of experts with the change of one product."""
        experts = self.network.get_submodule(name.rpartition(".")[0])
        if product != "down_proj":
            zero = torch.zeros_like(change)
            both = [change, zero] if product == "gate_proj" else [zero, change]
            interleaved = torch.stack(both, dim=2).flatten(1, 2)
            change = torch.cat(both, dim=1) if experts.is_concatenated else interleaved
        return weight + (change.mT if experts.is_transposed else change)


class Effective:
    """The model of an oracle with its effective weights, with the methods of a PEFT model that tests call."""

    def __init__(self, oracle: EagerOracle) -> None:
        self._oracle = oracle

    def __call__(self, input_ids: torch.Tensor) -> Any:
        """Return the model's output."""
        given = {"input_ids": input_ids}
        return functional_call(self._oracle.network, self._oracle.weights(), kwargs=given)

    def generate(self, **settings: Any) -> Any:
        """Return the output of `generate`."""
        network, own = self._oracle.network, self._oracle.weights()
        before = {name: each.detach() for name, each in network.named_parameters() if name in own}
        network.load_state_dict({name: each.detach() for name, each in own.items()}, strict=False, assign=True)
        found = network.generate(**settings)
        network.load_state_dict(before, strict=False, assign=True)
        return found

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute the base model within the context."""
        pairs, self._oracle.pairs = self._oracle.pairs, {}
        yield
        self._oracle.pairs = pairs


def random_weights(engine: Engine, run: str, spec: AdapterSpec) -> HostWeights:
    """Create a run whose B is not zero, and return its weights."""
    layout = engine.adapters.layout_of(spec)
    flat = initial_weights(spec, layout)
    generator = torch.Generator().manual_seed(spec.seed)
    for pair in layout.views(flat).values():
        pair.b.copy_(torch.randn(pair.b.shape, generator=generator) / 20)
    weights = HostWeights(spec, flat)
    found = engine.run([Load(run, 0, "start", weights, None, creates=True)]).outputs[run, 0]
    assert isinstance(found, LoadOutput), found
    return weights
