"""Plain transformers with the effective weights of an adapter, as an oracle for mixtures of experts.

PEFT adapts the experts' gate and up as one matrix, and shares no matrix among experts. Here each weight is
`W + scale * B @ A` of the matrices of our layout, with gradients by autograd.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call
from typing_extensions import override

from cotrain_workers.engine.adapters.bank import initial_weights
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Datum, HostWeights, Load, LoadOutput
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair
from tests.support.shared_base import load_plain
from tests.support.training import PeftOracle


class EagerOracle(PeftOracle):
    """The eager experts of transformers and `torch.optim.AdamW` on one adapter, one sequence at a time."""

    def __init__(self, folder: Path, spec: AdapterSpec, dtype: torch.dtype) -> None:
        self.model = load_plain(folder, dtype)
        self.model.set_experts_implementation("eager")
        self.dtype, self.device = dtype, "cpu"
        self._scale = spec.scale
        self._pairs: dict[str, Pair] = {}

    @override
    def load(self, layout: Layout, arena: torch.Tensor) -> None:
        self._pairs = {
            name: Pair(*(torch.nn.Parameter(each.to(self.dtype, copy=True)) for each in pair))
            for name, pair in layout.views(arena).items()
        }

    @override
    def parameters(self) -> list[torch.nn.Parameter]:
        pairs = self._pairs.values()
        return [each for pair in pairs for each in pair if isinstance(each, torch.nn.Parameter)]

    @override
    def arena(self, layout: Layout, *, grads: bool) -> torch.Tensor:
        flat = torch.zeros(layout.size, dtype=self.dtype)
        for name, pair in layout.views(flat).items():
            for ours, theirs in zip(pair, self._pairs[name], strict=True):
                found = theirs.grad if grads else theirs.detach()
                assert found is not None
                ours.copy_(found)
        return flat

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the effective weights by parameter."""
        known: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        found: dict[str, torch.Tensor] = {}
        for name, (a, b) in self._pairs.items():
            change = self._scale * b @ a  # of experts [experts, out, in]
            module, _, product = name.rpartition(".")
            if not module.endswith(".experts"):
                found[f"{name}.weight"] = known[f"{name}.weight"] + change
                continue
            fused = f"{module}.{'down_proj' if product == 'down_proj' else 'gate_up_proj'}"
            found[fused] = self._with(
                fused, found[fused] if fused in found else known[fused], change, product
            )
        return found

    def _with(
        self, name: str, weight: torch.Tensor, change: torch.Tensor, product: str
    ) -> torch.Tensor:
        """Return the fused weight of experts with the change of one product."""
        experts = self.model.get_submodule(name.rpartition(".")[0])
        if product != "down_proj":
            zero = torch.zeros_like(change)
            both = [change, zero] if product == "gate_proj" else [zero, change]
            interleaved = torch.stack(both, dim=2).flatten(1, 2)
            change = torch.cat(both, dim=1) if experts.is_concatenated else interleaved
        return weight + (change.mT if experts.is_transposed else change)

    @override
    def logprobs(self, datum: Datum) -> torch.Tensor:
        tokens = torch.from_numpy(datum.tokens)[None]
        logits = functional_call(self.model, self.weights(), kwargs={"input_ids": tokens}).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        columns = targets.reshape(len(targets), -1)
        return torch.log_softmax(logits, -1).gather(1, columns).reshape(targets.shape)

    def greedy(self, prompt: np.ndarray, count: int) -> list[int]:
        """Return the tokens that `generate` of transformers appends to a prompt."""
        self.model.load_state_dict(
            {name: weight.detach().clone() for name, weight in self.weights().items()},
            strict=False,
            assign=True,
        )
        tokens = self.model.generate(
            input_ids=torch.from_numpy(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
        )
        return tokens[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


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
