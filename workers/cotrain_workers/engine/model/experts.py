"""Experts of mixture-of-experts models: base products and LoRA of the tokens that each expert receives.

`experts_by_adapter` is registered with transformers as `BY_ADAPTER`, in place of the loop over experts in each model.
The router and shared experts remain the modules of transformers. The router is frozen.

Each pair of a token and one of its experts is a row. Rows are sorted by expert and then by token, so those of one
adapter are adjacent within an expert. The rows of an expert are padded, because a row of a product has the same
bits in every matrix of 32 rows or more. So the bits of a run do not depend on its neighbours, and there is no limit
on the number of adapters. Gradients are added adapter by adapter, and within an adapter in the order of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import CLAMPED, GELU, SILU
from cotrain_workers.engine.lora.segmented import add_product, anchor
from cotrain_workers.engine.model.expert_choice import ExpertChoices, expert_choices, replay
from cotrain_workers.engine.routing import ExpertRows, ExpertWeights, Group, Part, Router, bucket
from cotrain_workers.engine.spec import Target, kept_share

BY_ADAPTER = "cotrain_by_adapter"
PRODUCTS = ("gate_proj", "up_proj", "down_proj")
"""Products of an expert, as targets of LoRA below the name of the experts module."""
LIMIT, STEEPNESS = 7.0, 1.702  # of the gate of gpt-oss


@dataclass(frozen=True)
class Dispatch:
    """Rows of the experts of one layer."""

    tokens: torch.Tensor  # int64 [P]: token of each row; padding repeats token 0
    rows: torch.Tensor  # int64 [T * k]: row of each pair
    blocks: Sequence[Group]  # padded rows of each expert with tokens
    groups: ExpertRows  # of each adapter, in ascending order of experts


def dispatch(chosen: np.ndarray, experts: int, segments: Sequence[tuple[int, int]], device: torch.device) -> Dispatch:
    """Return the rows of tokens whose experts are `chosen` `[T, k]`; `segments` are (start, stop) of adapters."""
    width = chosen.shape[1]
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    sizes = [bucket(count) if count else 0 for count in counts.tolist()]
    starts = np.cumsum([0, *sizes])
    rows = np.empty(len(flat), np.int64)
    rows[order] = np.arange(len(flat)) + np.repeat(starts[:-1] - np.cumsum(counts) + counts, counts)
    tokens = np.zeros(starts[-1], np.int64)
    tokens[rows] = np.arange(len(flat)) // width
    groups = {}
    filled = np.zeros(experts, np.int64)  # pairs of tokens before `end`
    end = 0
    for start, stop in segments:
        filled += np.bincount(flat[end * width : start * width], minlength=experts)
        own = np.bincount(flat[start * width : stop * width], minlength=experts)
        first = starts[:-1] + filled
        groups[start] = [
            Group(each, int(first[each]), int(first[each] + own[each])) for each in np.flatnonzero(own).tolist()
        ]
        filled += own
        end = stop
    blocks = [Group(each, int(starts[each]), int(starts[each + 1])) for each in np.flatnonzero(counts).tolist()]
    return Dispatch(to_device(tokens, device), to_device(rows, device), blocks, groups)


class ToExperts(torch.autograd.Function):
    """Copies of tokens `[T, d]` in the rows `[P, d]` of their experts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Dispatch) -> torch.Tensor:  # type: ignore[explicit-override]
        """Return the rows."""
        ctx.rows, ctx.length = rows, len(x)
        return x.index_select(0, rows.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of the tokens, each the sum over its experts in their order."""
        # Not by token: padding may have a gradient that is not finite.
        pairs = grads[0].index_select(0, ctx.rows.rows)
        return pairs.view(ctx.length, -1, pairs.shape[1]).sum(dim=1), None


class ExpertProduct(torch.autograd.Function):
    """`y = x W_e^T + b_e` on the rows of each expert, and `y += scale (x A_e^T) B_e^T` on those of each adapter."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: Dispatch,
        parts: Sequence[Part],
    ) -> torch.Tensor:
        """Map `x` `[P, in]` to `[P, out]`; `weight` is `[experts, out, in]`, `bias` `[experts, out]`."""
        y = base_product(x, weight, bias, rows)
        lows = []
        for part, (expert, start, stop) in groups_of(parts, rows):
            low = torch.mm(of_expert(part.weights.a, expert), x[start:stop].t())  # [rank, n]
            y[start:stop].t().addmm_(of_expert(part.weights.b, expert), low, alpha=part.scale)
            lows.append(low)
        ctx.save_for_backward(x, weight, *lows)
        ctx.rows, ctx.parts = rows, parts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`; add the gradients of the LoRA matrices to their arenas."""
        x, weight, *lows = ctx.saved_tensors
        gy, rows = grads[0].contiguous(), ctx.rows
        gx = None
        if ctx.needs_input_grad[0]:
            gx = torch.empty_like(x)
            for expert, start, stop in rows.blocks:
                torch.mm(gy[start:stop], weight[expert], out=gx[start:stop])
        for part in ctx.parts:
            if part.grads is not None and not kept_share(part.grads):
                part.grads.a.zero_()
                part.grads.b.zero_()
        pairs = zip(groups_of(ctx.parts, rows), lows, strict=True)
        for (part, (expert, start, stop)), low in pairs:
            gyt = gy[start:stop].t()
            low_grad = torch.mm(of_expert(part.weights.bt, expert), gyt)  # [rank, n]
            if part.grads is not None:
                add_product(of_expert(part.grads.b, expert), gyt, low.t(), part.scale)
                add_product(of_expert(part.grads.a, expert), low_grad, x[start:stop], part.scale)
            if gx is not None:
                at = of_expert(part.weights.at, expert)
                gx[start:stop].t().addmm_(at, low_grad, alpha=part.scale)
        return gx, None, None, None, None, None


def base_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: Dispatch) -> torch.Tensor:
    """Map `x` `[P, in]` to `[P, out]`, the rows of each expert by its weight, without LoRA."""
    y = x.new_empty(len(x), weight.shape[1])
    for expert, start, stop in rows.blocks:
        torch.mm(x[start:stop], weight[expert].t(), out=y[start:stop])
        if bias is not None:
            y[start:stop].add_(bias[expert])
    return y


def groups_of(parts: Sequence[Part], rows: Dispatch) -> Iterator[tuple[Part, Group]]:
    """Yield each adapter with its rows in each expert, in the order in which gradients are added."""
    for part in parts:
        for group in rows.groups[part.start]:
            yield part, group


def of_expert(matrices: torch.Tensor, expert: int) -> torch.Tensor:
    """Return the matrix of an expert, or the one that all experts share."""
    return matrices[expert if len(matrices) > 1 else 0]


def experts_by_adapter(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's experts `[T, d]`, with the adapter of the token.

    `hidden` is `[T, d]`, `index` and `weights` `[T, k]` are the chosen experts and their weights.
    """
    router: Router = module.cotrain_router
    step, name = router.step, module.cotrain_name
    if step is None and isinstance(router.route.lora, FusedLora):
        return router.route.lora.experts(name, own_weights(module), hidden, index, weights)
    if step is not None:
        found = step.experts(name, own_weights(module), hidden, index, weights)
        if found is not None:
            return found
    segments = step.segments if step else [(s.start, s.stop) for s in router.route.segments]
    rows = dispatch(choices_on_host(index), module.num_experts, segments, index.device)

    def product(of: str, x: torch.Tensor) -> torch.Tensor:
        target = f"{name}.{of}"
        matrix, bias = weight_of(module, of)
        if step is not None:
            y = base_product(x, matrix, bias, rows)
            step.add_to_experts(target, x, y, rows.groups)
            return y
        own = router.route.lora.parts(target)
        needs_grad = anchor(any(part.grads for part in own))
        out: torch.Tensor = ExpertProduct.apply(x, needs_grad, matrix, bias, rows, own)  # type: ignore[no-untyped-call]  # torch gives it no types
        return out

    x: torch.Tensor = ToExperts.apply(hidden, rows)  # type: ignore[no-untyped-call]  # torch gives it no types
    y = product("down_proj", gated(module, product("gate_proj", x), product("up_proj", x)))
    pairs = y.index_select(0, rows.rows).view(*index.shape, -1)
    return (pairs * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


def own_weights(module: Any) -> ExpertWeights:
    """Return the weights of an experts module for kernels."""
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return ExpertWeights(module.gate_up_proj, module.down_proj, module.cotrain_gate, *biases)


def choices_on_host(index: torch.Tensor) -> np.ndarray:
    """Return the chosen experts `[T, k]` on the host, which waits for the router of the layer."""
    chosen: np.ndarray = index.cpu().numpy()
    return chosen


def weight_of(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight `[experts, out, in]` of a product of an experts module, and any bias `[experts, out]`."""
    fused = "down_proj" if name == "down_proj" else "gate_up_proj"
    weight = getattr(module, fused)
    weight = weight.mT if module.is_transposed else weight
    bias = getattr(module, f"{fused}_bias") if module.has_bias else None
    if fused == name:
        return weight, bias
    half = weight.shape[1] // 2
    at_gate = name == "gate_proj"
    if module.is_concatenated:
        own = slice(0, half) if at_gate else slice(half, None)
    else:
        own = slice(0 if at_gate else 1, None, 2)
    return weight[:, own], None if bias is None else bias[:, own]


def gated(module: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the inner values `[P, I]` of experts."""
    if type(module)._apply_gate is _default_apply_gate:
        inner: torch.Tensor = module.act_fn(gate) * up
        return inner
    if alternates(module):
        return module._apply_gate(torch.stack([gate, up], dim=-1).flatten(-2))  # type: ignore[no-any-return]
    return module._apply_gate(torch.cat([gate, up], dim=-1))  # type: ignore[no-any-return]


def clamped_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the inner values of experts with the gate of gpt-oss."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * STEEPNESS))


def alternates(module: Any) -> bool:
    """Return True if a model's experts have gate and up in turn, also after `rearrange`."""
    return bool(getattr(module, "cotrain_alternates", not module.is_concatenated))


@torch.no_grad()
def rearrange(module: Any) -> None:
    """Store the weights of experts as most models do: `[experts, out, in]`, the rows of the gate before those of up.

    The kernels then take those of gpt-oss, too, which are transposed, with gate and up in turn.
    """
    module.cotrain_alternates = alternates(module)
    if not module.is_transposed and module.is_concatenated:
        return
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias"):
        found = getattr(module, name, None)
        if found is None:
            continue
        values = found.mT if module.is_transposed and found.dim() == 3 else found
        if name != "down_proj" and not module.is_concatenated:
            values = torch.cat([values[:, ::2], values[:, 1::2]], dim=1)
        setattr(module, name, nn.Parameter(values.contiguous(), requires_grad=False))
    module.is_transposed, module.is_concatenated = False, True


def unfused(module: Any) -> str:
    """Return why the fused kernels cannot compute an experts module, or an empty string."""
    return "" if gate_of(module) else "the gate of its experts has no kernel"


def gate_of(module: Any) -> int:
    """Return the number of the gate kernel of experts, 0 if there is none."""
    gate = torch.linspace(-9, 9, 64)
    up = gate.flip(0) * 1.1
    by_kind = {
        SILU: functional.silu(gate) * up,
        GELU: functional.gelu(gate, approximate="tanh") * up,
        CLAMPED: clamped_gate(gate, up),
    }
    own = gated(module, gate, up)
    return next((kind for kind, known in by_kind.items() if torch.equal(own, known)), 0)


def is_experts(module: nn.Module) -> bool:
    """Return True for a module that holds all experts of a layer, with the interface of transformers."""
    return hasattr(module, "is_concatenated") and hasattr(module, "gate_up_proj")


def expert_targets(name: str, module: Any) -> list[Target]:
    """Return the targets of an experts module: one shared matrix on the model's width, the other per expert."""
    experts, targets = module.num_experts, []
    for product in PRODUCTS:
        outputs, inputs = weight_of(module, product)[0].shape[1:]
        at_end = product == "down_proj"
        count_a, count_b = (experts, 1) if at_end else (1, experts)
        counts = experts, count_a, count_b, alternates(module)
        targets.append(Target(f"{name}.{product}", "mlp", inputs, outputs, *counts))
    return targets


def choices_of(network: nn.Module, config: Any) -> ExpertChoices | None:
    """Return the sizes of the choices of a model's routers; None without experts, or if layers differ."""
    counts = [int(each.num_experts) for each in network.modules() if is_experts(each)]  # type: ignore[arg-type]  # of transformers
    return expert_choices(config, counts)


def attach(network: Any, router: Router) -> None:
    """Attach the router to the experts of a model, and replace their function. Do nothing without experts."""
    found = [(name, module) for name, module in network.named_modules() if is_experts(module)]
    if not found:
        return
    ALL_EXPERTS_FUNCTIONS.register(BY_ADAPTER, experts_by_adapter)
    network.set_experts_implementation(BY_ADAPTER)
    network.config.output_router_logits = False  # for a loss of the router, which is frozen
    for number, (name, module) in enumerate(found):
        module.cotrain_router, module.cotrain_name = router, name
        rearrange(module)
        module.cotrain_gate = router.expert_gate = gate_of(module)
        router.unfused_experts = router.unfused_experts or unfused(module)
        block = network.get_submodule(name.rpartition(".")[0])
        replay(block, router, number, module.num_experts)
