"""Decoder layers for the LoRA backend `fused`: gates and residual additions inside the products next to them.

A layer is run as this file knows it, or else as it is. The decoder has a route of its own, and runs it as it is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cotrain_workers.engine.lora.fused.operators import GELU, SILU
from cotrain_workers.engine.model.compile import is_right
from cotrain_workers.engine.model.fusion import (
    ROWS,
    example,
    first_equal,
    gelu_gate,
    norm_then_weight,
    norm_with_one,
    silu_gate,
)
from cotrain_workers.engine.model.kept_norm import KeptNorm

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
    gates = [_fuse_gate(layer.mlp, base.router) for layer in layers]
    done = {
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


def kept_norm(norm: Any) -> Norm | None:
    """Return a kernel that gives a norm and what it is of; None if the norm is not known, or the kernel not right."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    x = example(norm.weight, ROWS, len(norm.weight))
    given = (x, norm.weight, eps)
    pure = first_equal((norm_then_weight, norm_with_one), given, type(norm).forward(norm, x))
    if pure is None:
        return None
    one = pure is norm_with_one

    def kernel(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return KeptNorm.apply(x, weight, eps, one)  # type: ignore[no-untyped-call]

    def kept(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        return pure(x, weight, eps), x.view_as(x)

    if not is_right(kernel, kept, 1, given):
        return None
    return lambda x: kernel(x, norm.weight, eps)
