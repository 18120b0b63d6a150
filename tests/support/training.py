"""Datums, ops and a plain-PEFT oracle for tests of the engine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model.families import MODEL_TYPES
from cotrain_workers.engine.ops import Create, Datum, Op, OptimStep, Pass
from cotrain_workers.engine.spec import AdapterSpec, Layout
from cotrain_workers.engine.training.losses import LOSSES
from tests.support.shared_base import load_plain

#: Fixtures of `tests/unit/workers/conftest.py`.
NewEngine = Callable[..., Engine]
ModelFolder = Callable[..., Path]


def modules_of(network: Any, spec: AdapterSpec) -> list[str]:
    """Return the names of the modules that an adapter trains in a model."""
    modules = MODEL_TYPES[network.config.get_text_config().model_type].modules
    return [name for name, family in modules.items() if spec.trains(family)]


def random_datum(rng: np.random.Generator, loss_fn: str, length: int, *, vocab: int = 128, columns: int = 0) -> Datum:
    """Return a datum with every input that `loss_fn` reads. `columns > 0` makes them 2-D."""
    shape = (length, columns) if columns else (length,)
    targets = rng.integers(0, vocab, shape)
    values: dict[str, Any] = {
        "weights": rng.normal(size=shape),
        # near the log-probabilities of a tiny model, so that ratios straddle the clip bounds
        "logprobs": rng.normal(-math.log(vocab), 1.0, shape),
        "advantages": rng.normal(size=shape) * (rng.random(shape) > 0.3),
        "sequence_ratio_mask": (rng.random(shape) > 0.3),
    }
    inputs = {name: values[name].astype(np.float32) for name in LOSSES[loss_fn].inputs}
    return Datum(rng.integers(0, vocab, length), {"target_tokens": targets, **inputs})


@dataclass(frozen=True)
class Tenant:
    """One run of a test: adapter, lengths, loss."""

    run: str
    spec: AdapterSpec
    loss_fn: str
    lengths: Sequence[int]
    columns: int = 0
    learning_rate: float = 1e-2

    def ops(self, cycle: int) -> list[Op]:
        """Return this run's ops of one cycle, which do not depend on other runs in it.

        Cycle 0 creates the run. Every cycle has two gradient passes around a forward, and a step.
        """
        rng = np.random.default_rng([cycle, *self.run.encode()])
        first = 5 * cycle
        datums = [random_datum(rng, self.loss_fn, length, columns=self.columns) for length in self.lengths]
        half = len(datums) // 2 or 1
        ops: list[Op] = [Create(self.run, first, self.spec)] if cycle == 0 else []
        for at, (part, needs_grad) in enumerate(((datums[:half], True), (datums[::-1], False), (datums[half:], True))):
            ops.append(Pass(self.run, first + 1 + at, part, self.loss_fn, {}, needs_grad))
        step = OptimStep(self.run, first + 4, self.learning_rate, 0.9, 0.95, 1e-8, 0.01, grad_clip_norm=1.0)
        return [*ops, step]


# Runs with various ranks, targets, losses, alphas and lengths, including lengths 1 and 2.
MIX = (
    Tenant("all-8", AdapterSpec(8, seed=1), "cross_entropy", (17, 1, 40, 2)),
    Tenant("attn-1", AdapterSpec(1, 2, train_mlp=False, train_unembed=False), "ppo", (33, 33)),
    Tenant("mlp-4", AdapterSpec(4, 3, train_attn=False, alpha=4.0), "gspo", (5, 12, 2)),
    Tenant("head-16", AdapterSpec(16, 4, train_attn=False, train_mlp=False), "cispo", (9, 1)),
    Tenant("all-5", AdapterSpec(5, 5), "importance_sampling", (2, 64)),
    Tenant("soft-8", AdapterSpec(8, 6, train_unembed=False), "cross_entropy", (7, 30), columns=3),
    Tenant("all-1", AdapterSpec(1, 7), "dro", (1,)),
)


class PeftOracle:
    """Plain PEFT and `torch.optim.AdamW` on one adapter, one sequence at a time."""

    def __init__(self, folder: Path, spec: AdapterSpec, dtype: torch.dtype, device: str = "cpu") -> None:
        base: Any = load_plain(folder, dtype)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules=modules_of(base, spec),
            exclude_modules=r"model\.(vision_tower|multi_modal_projector|visual)\..*",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tied embeddings, and deprecated names of transformers
            self.model = get_peft_model(base.to(device), config, autocast_adapter_dtype=False)
        self._parameters = {
            name.removeprefix("base_model.model."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.dtype = dtype
        self.device = device

    def load(self, layout: Layout, arena: torch.Tensor) -> None:
        """Copy a weight arena into PEFT's parameters."""
        with torch.no_grad():
            for name, pair in layout.views(arena).items():
                self._parameters[f"{name}.lora_A.default.weight"].copy_(pair.a)
                self._parameters[f"{name}.lora_B.default.weight"].copy_(pair.b)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters."""
        return list(self._parameters.values())

    def arena(self, layout: Layout, *, grads: bool) -> torch.Tensor:
        """Return PEFT's weights or gradients in arena layout."""
        flat = torch.zeros(layout.size, dtype=self.dtype)
        for name, pair in layout.views(flat).items():
            for ours, letter in ((pair.a, "A"), (pair.b, "B")):
                theirs = self._parameters[f"{name}.lora_{letter}.default.weight"]
                ours.copy_(theirs.grad if grads else theirs.detach())
        return flat

    def logprobs(self, datum: Datum) -> torch.Tensor:
        """Return the log-probabilities of a datum's targets, in their shape."""
        tokens = torch.from_numpy(datum.tokens).to(self.device)
        logits = self.model(input_ids=tokens[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"]).to(self.device)
        columns = targets.reshape(len(targets), -1)
        return torch.log_softmax(logits, -1).gather(1, columns).reshape(targets.shape)

    def backward(self, op: Pass) -> tuple[float, float]:
        """Add the gradient of a pass, datum by datum. Return its summed loss, and that of absolute terms."""
        total, size = 0.0, 0.0
        loss = LOSSES[op.loss_fn]
        for datum in op.datums:
            inputs = {name: torch.from_numpy(datum.inputs[name]).to(self.device, self.dtype) for name in loss.inputs}
            terms = loss.compute(self.logprobs(datum), inputs, {**loss.defaults, **op.loss_config})
            terms.sum().backward()
            total += terms.sum(dtype=torch.float64).item()
            size += terms.abs().sum().item()
        return total, size


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def mean_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the root mean square of the difference relative to the largest value."""
    return float((ours - theirs).square().mean().sqrt() / theirs.abs().max())


def same_bits(one: AdapterState, other: AdapterState) -> bool:
    """Return True if two states have equal bits."""
    return one.digest() == other.digest()
