"""Decoder layers for the LoRA backend `fused`: gates and residual additions inside the products next to
them, and norms in one kernel with what follows.

A layer is run as this file knows it, or else as it is. The decoder has a route of its own, and runs it as it is.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from cotrain_workers.engine.lora.fused.operators import GELU, SILU
from cotrain_workers.engine.model.compile import is_right
from cotrain_workers.engine.model.fusion import (
    ROPE,
    ROWS,
    example,
    first_equal,
    gelu_gate,
    norm_then_weight,
    norm_with_one,
    rotate,
    silu_gate,
    with_global,
)
from cotrain_workers.engine.model.kept_norm import KeptNorm
from cotrain_workers.engine.model.rotated_norm import RotatedNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cotrain_workers.engine.model.base_model import BaseModel
    from cotrain_workers.engine.routing import Router

    Norm = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: A layer of these alone adds to its input what attention made of a norm, and then what the MLP made of another.
NORMS = ("input_layernorm", "post_attention_layernorm")
PARTS = {*NORMS, "self_attn", "mlp"}

log = logging.getLogger(__name__)


def fuse_layers(base: BaseModel) -> tuple[str, ...]:
    """Let the layers of a base model, whose LoRA backend is `fused`, compute in its products what they can;
    return what that is.
    """
    layers: Any = base.backbone.layers
    heads = [_fuse_heads(layer.self_attn, base.router) for layer in layers]
    gates = [_fuse_gate(layer.mlp, base.router) for layer in layers]
    done = {
        "heads": heads,
        "mlp": gates,
        "residuals": [
            all(gates) and _fuse_residuals(layer, base.router, base.recompute.asking)
            for layer in layers
        ],
    }
    return tuple(name for name, each in done.items() if all(each))


def _fuse_gate(mlp: Any, router: Router) -> bool:
    shape = (1, ROWS, mlp.down_proj.weight.shape[1])
    both = [example(mlp.down_proj.weight, *shape) for _ in range(2)]
    pure = first_equal((silu_gate, gelu_gate), both, mlp.act_fn(both[0]) * both[1])
    if pure is None:
        return False
    gate, plain = (SILU if pure is silu_gate else GELU), mlp.forward

    def forward(x: torch.Tensor) -> Any:
        if router.step is not None:
            return plain(x)
        lora: Any = router.route.lora
        return lora.mlp(mlp.gate_proj.name, mlp.down_proj.name, gate, x)

    mlp.forward = forward
    return True


def _fuse_residuals(layer: Any, router: Router, asking: Callable[[Any], Any]) -> bool:
    """Run a layer whose MLP computes its gate inside its products."""
    if {name for name, _ in layer.named_children()} != PARTS:
        return False
    before_attention, before_mlp = (kept_norm(getattr(layer, name)) for name in NORMS)
    if before_attention is None or before_mlp is None:
        return False
    plain = layer.forward

    def forward(hidden_states: torch.Tensor, **rest: Any) -> Any:
        lora: Any = router.route.lora
        normed, kept = before_attention(hidden_states)
        lora.add_to(layer.self_attn.o_proj.name, kept)
        hidden_states, _ = layer.self_attn(hidden_states=normed, **rest)
        normed, kept = before_mlp(hidden_states)
        lora.add_to(layer.mlp.down_proj.name, kept)
        return layer.mlp(normed)

    trained = asking(forward)
    layer.forward = lambda *args, **rest: (trained if router.step is None else plain)(*args, **rest)
    return True


def _fuse_heads(attention: Any, router: Router) -> bool:
    """Norm queries and keys where they are rotated, in an attention that does so one after the other."""
    norms: list[Any] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    original = type(attention).forward
    if None in norms or ROPE not in original.__code__.co_names:
        return False
    before = attention.forward.__globals__[ROPE]
    kernels = [rotated_norm(norm) for norm in norms]
    if None in kernels:
        return False

    def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        if router.step is not None:
            return before(q, k, cos, sin)
        pairs = zip(kernels, (q, k), strict=True)
        return tuple(kernel(x, cos, sin) for kernel, x in pairs if kernel is not None)

    for norm in norms:
        norm.forward = partial(_unless_trained, router, norm.forward)
    attention.forward = with_global(original, ROPE, turned).__get__(attention)
    return True


def _unless_trained(router: Router, norm: Any, x: torch.Tensor) -> Any:
    return x if router.step is None else norm(x)


def rotated_norm(norm: Any) -> Any:
    """Return a kernel that norms and turns heads `[1, heads, T, size]`, or None as `kept_norm` does."""
    weight, eps, pure = known_norm(norm)
    if pure is None:
        return None
    one, size = pure is norm_with_one, len(weight)

    def kernel(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        given = x.transpose(1, 2).squeeze(0), norm.weight, cos.squeeze(0), sin.squeeze(0)
        y = RotatedNorm.apply(*given, eps, one)  # type: ignore[no-untyped-call]
        return y.unsqueeze(0).transpose(1, 2)

    def normed_and_turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return rotate(pure(x, weight, eps), x, cos, sin)[0]

    x = example(weight, 1, ROWS, 2, size).transpose(1, 2)
    angles = [example(weight, 1, ROWS, size) for _ in range(2)]
    return kernel if is_right(kernel, normed_and_turned, 1, (x, *angles)) else None


def known_norm(norm: Any) -> tuple[torch.Tensor, float, Any]:
    """Return the weight of a norm, its epsilon, and which of the known functions it is, or None."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    x = example(norm.weight, ROWS, len(norm.weight))
    given = (x, norm.weight, eps)
    pure = first_equal((norm_then_weight, norm_with_one), given, type(norm).forward(norm, x))
    return norm.weight, eps, pure


def kept_norm(norm: Any) -> Norm | None:
    """Return a kernel that gives a norm and what it is of; None if the norm is not known, or the kernel not right."""
    weight, eps, pure = known_norm(norm)
    if pure is None:
        return None
    one, x = pure is norm_with_one, example(weight, ROWS, len(weight))

    def kernel(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return KeptNorm.apply(x, weight, eps, one)  # type: ignore[no-untyped-call]

    def kept(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return pure(x, weight, eps), x.view_as(x)

    if not is_right(kernel, kept, 1, (x, weight, eps)):
        return None
    return lambda x: kernel(x, norm.weight, eps)
