"""Comparison of a kernel with the function that it replaces, before it is used.

Experts with fused LoRA are compared with the loop over adapters, on a small random problem.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers.integrations.moe import _default_apply_gate
from typing_extensions import override

from cotrain_workers.engine.device import check_device
from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import CLAMPED, SILU
from cotrain_workers.engine.lora.fused.tables import plan_groups
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import LENGTHS, SPECS, random_adapter
from cotrain_workers.engine.lora.self_check import TOLERANCE as LORA_TOLERANCE
from cotrain_workers.engine.model.experts import clamped_gate, expert_targets, experts_by_adapter
from cotrain_workers.engine.routing import Segment, TrainingLora
from cotrain_workers.engine.spec import AdapterSpec, Target

Pure = Callable[..., Any]

#: Relative to the largest value. A kernel that keeps fp32 between two operations where eager mode rounds to 16 bits
#: differs by one rounding, and by another one in the backward of a product.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
#: Random experts of a layer, and those of each token.
EXPERTS, CHOSEN = 7, 3
#: Width of the model and of an expert: small tiles, and those of a real model.
SIZES, WIDE_SIZES = (64, 48), (1024, 512)

log = logging.getLogger(__name__)


def agrees(what: str, device: torch.device, tolerance: float, measure: Callable[[], float]) -> bool:
    """Return True if a measured difference is within the tolerance; log a failure or a mismatch. Raises DeviceLost."""
    try:
        found = measure()
    except Exception:  # compilers raise exceptions of any type
        check_device(device)
        log.exception("%s cannot run here and is not used", what)
        return False
    if not found <= tolerance:
        log.error("%s is off by %.3g and is not used", what, found)
    return found <= tolerance


def is_right(kernel: Pure, function: Pure, tensors: int, examples: Sequence[Any]) -> bool:
    """Return True if a kernel matches its function, forward and backward for the first `tensors` arguments.

    It is also compared without gradients, as used by the decoder. A failure or a mismatch is logged. Raises DeviceLost.
    """
    inputs, rest = examples[:tensors], examples[tensors:]

    def measure() -> float:
        found = 0.0
        if inputs:
            found = difference(lambda *args: kernel(*args, *rest), lambda *args: function(*args, *rest), *inputs)
        with torch.inference_mode():
            return max(found, apart(outs_of(kernel, examples), outs_of(function, examples)))

    first = examples[0]
    return agrees(f"The kernel of {function.__name__}", first.device, TOLERANCE[first.dtype], measure)


def difference(ours: Pure, theirs: Pure, *inputs: torch.Tensor) -> float:
    """Return the largest relative difference of two functions of tensors, and of their gradients."""
    return apart(*(outs_and_gradients(function, inputs) for function in (ours, theirs)))


def apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of tensors, relative to the largest value."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )


def outs_of(function: Pure, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a function as a tuple."""
    outs = function(*args)
    return outs if isinstance(outs, tuple) else (outs,)


def outs_and_gradients(function: Pure, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a function and its gradients for varying output gradients."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        outs = outs_of(function, leaves)
        slopes = [torch.linspace(-1, 1, out.numel(), device=out.device) for out in outs]
        shaped = [s.view(out.shape).to(out.dtype) for s, out in zip(slopes, outs, strict=True)]
        grads = torch.autograd.grad(outs, leaves, shaped)
    return [*(out.detach() for out in outs), *grads]


def example(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random values with the device and dtype of `like`, without changing a global generator."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)


class RandomExperts:
    """Random experts of a layer, as a module of transformers has them."""

    _apply_gate = _default_apply_gate
    is_transposed, is_concatenated, has_bias, has_gate = False, True, False, True
    cotrain_name, cotrain_gate = "0.mlp.experts", SILU
    cotrain_router: Any = None
    act_fn = staticmethod(functional.silu)

    def __init__(self, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype, experts: int) -> None:
        generator = torch.Generator().manual_seed(2)
        width, inner = sizes

        def random(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
            return values.to(device, dtype)

        self.num_experts = experts
        self.gate_up_proj, self.down_proj = (random(experts, 2 * inner, width), random(experts, width, inner))

    @property
    def targets(self) -> list[Target]:
        """Targets of LoRA."""
        return expert_targets(self.cotrain_name, self)


class ClampedExperts(RandomExperts):
    """Random experts with the gate and biases of gpt-oss."""

    has_bias, cotrain_gate = True, CLAMPED

    def __init__(self, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype, experts: int) -> None:
        super().__init__(sizes, device, dtype, experts)
        generator = torch.Generator().manual_seed(4)
        width, inner = sizes
        # Some columns are far beyond the limits of the gate, and the others far within. At a limit, one rounding
        # decides whether a value has a gradient.
        beyond = 12.0 * torch.randint(-4, 5, (experts, 2 * inner), generator=generator).div(4, rounding_mode="trunc")
        self.gate_up_proj_bias = beyond.to(device, dtype)
        self.down_proj_bias = (torch.randn(experts, width, generator=generator) / 2).to(device, dtype)

    @staticmethod
    @override
    def _apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        return clamped_gate(*gate_up.chunk(2, dim=-1))


def random_experts(
    gate: int, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype, experts: int = EXPERTS
) -> RandomExperts:
    """Return random experts of a kind of gate."""
    return (ClampedExperts if gate == CLAMPED else RandomExperts)(sizes, device, dtype, experts)


class Tokens(NamedTuple):
    """Random tokens, their experts, and the gradients of the results."""

    x: torch.Tensor  # [T, width]
    weights: torch.Tensor  # [T, k]
    chosen: torch.Tensor  # int64 [T, k]
    slopes: torch.Tensor  # [T, width]


def wrong_result(device: torch.device, dtype: torch.dtype, gate: int = SILU) -> str | None:
    """Return the result of fused experts with a gate that is wrong on a device, or None if there is none."""
    # On a CPU, kernels are interpreted, and the wide sizes take minutes.
    sizes = [SIZES, WIDE_SIZES] if device.type == "cuda" else [SIZES]
    found = [disagreement(device, dtype, own, gate) for own in sizes]
    return next(filter(None, found), None)


def disagreement(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int] = SIZES, gate: int = SILU
) -> str | None:
    """Return the result of fused experts that differs from that of the loop by more than rounding, or None."""
    module = random_experts(gate, sizes, device, dtype, EXPERTS)
    tokens = random_tokens(module, sum(LENGTHS) + 3)
    if gate == CLAMPED:
        tokens = tokens._replace(x=tokens.x / 16)  # so that no value is near a limit
    expected, found = (run(module, segments_of(module, SPECS, LENGTHS), tokens, name) for name in ("seg", "fused"))
    for name, theirs in expected.items():
        error = float((found[name] - theirs).abs().max() / theirs.abs().max())
        if not error <= LORA_TOLERANCE[dtype]:
            return f"its {name} of experts differs from that of a loop by {error:.1e} of the largest value"
    return None


def segments_of(module: RandomExperts, specs: Sequence[AdapterSpec], lengths: Sequence[int]) -> list[Segment]:
    """Return a segment with a zeroed gradient for each adapter. Every second one has all matrices for each expert."""
    generator, segments, start = torch.Generator().manual_seed(0), [], 0
    like = module.down_proj
    for number, (spec, length) in enumerate(zip(specs, lengths, strict=True)):
        own = replace(spec, per_expert=number % 2 == 1)
        adapter = random_adapter(own, like.device, like.dtype, generator, module.targets)
        segments.append(Segment(start, start + length, adapter, spec.scale, adapter.new_gradient()))
        start += length
    return segments


def random_tokens(module: RandomExperts, rows: int) -> Tokens:
    """Return random tokens; the first expert has most of them, and the last one has none."""
    like, generator = module.down_proj, torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    scores = torch.rand(rows, module.num_experts, generator=generator)
    scores[:, 0] += 0.5
    scores[:, -1] = -1
    index = scores.topk(CHOSEN).indices.to(like.device)
    width = like.shape[1]
    return Tokens(random(rows, width), random(rows, CHOSEN).sigmoid(), index, random(rows, width))


def run(module: RandomExperts, segments: Sequence[Segment], tokens: Tokens, backend: str) -> dict[str, torch.Tensor]:
    """Run tokens forward and backward through the experts; return all results by name."""
    lora: TrainingLora = SegmentLora(segments)
    if backend == "fused":
        lora = FusedLora(segments, len(tokens.x), plan_groups(module.targets), {})
    module.cotrain_router = SimpleNamespace(step=None, route=SimpleNamespace(lora=lora, segments=segments))
    x, weights = (each.detach().requires_grad_() for each in (tokens.x, tokens.weights))
    y = experts_by_adapter(module, x, tokens.chosen, weights)
    gx, of_weights = torch.autograd.grad(y, (x, weights), tokens.slopes)
    found = {"output": y.detach(), "gradient of x": gx, "gradient of the weights": of_weights}
    for number, segment in enumerate(segments):
        for name, pair in (segment.grads or {}).items():
            product = name.rpartition(".")[2]
            found[f"gradient of A of {product} and adapter {number}"] = pair.a
            found[f"gradient of B of {product} and adapter {number}"] = pair.b
    return {name: value.float() for name, value in found.items()}
