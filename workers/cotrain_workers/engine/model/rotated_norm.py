"""The RMS norm of the heads of queries or keys and their rotation, as one kernel; one back."""

from __future__ import annotations

from typing import Any

import torch

from cotrain_workers.engine.model.kept_norm import WARPS, block

_LIBRARY = torch.library.Library("cotrain", "FRAGMENT")
_GIVEN = "Tensor x, Tensor weight, Tensor cos, Tensor sin"
SCHEMAS = {
    # x [T, heads, size], cos and sin [T, size]; `one`: the scale is one more than the weight
    "rotated_norm": f"({_GIVEN}, float eps, bool one) -> Tensor",
    "rotated_norm_back": f"({_GIVEN}, Tensor gy, float eps, bool one) -> Tensor",
}


class RotatedNorm(torch.autograd.Function):
    """`x` `[T, heads, size]`, each head normed and turned by `cos` and `sin` `[T, size]`. The weight is frozen."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        one: bool,
    ) -> torch.Tensor:
        """Return the same shape."""
        given = [each.contiguous() for each in (x, weight, cos, sin)]
        ctx.save_for_backward(*given)
        ctx.rest = eps, one
        y: torch.Tensor = torch.ops.cotrain.rotated_norm(*given, eps, one)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        gy = grads[0].contiguous()
        gx = torch.ops.cotrain.rotated_norm_back(*ctx.saved_tensors, gy, *ctx.rest)
        return gx, *[None] * 5


def rotated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    one: bool,
) -> torch.Tensor:
    """Return each head normed and turned."""
    return _run("rotated", x, weight, cos, sin, eps=eps, one=one)


def rotated_norm_back(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    gy: torch.Tensor,
    eps: float,
    one: bool,
) -> torch.Tensor:
    """Return the gradient of `x`."""
    return _run("rotated_back", x, weight, cos, sin, gy, eps=eps, one=one)


def _run(name: str, x: torch.Tensor, *rest: torch.Tensor, eps: float, one: bool) -> torch.Tensor:
    from cotrain_workers.engine.model import norm_programs

    rows, heads, size = x.shape
    out = torch.empty_like(x)
    getattr(norm_programs, name)[(rows,)](
        x, *rest, out, heads, size // 2, eps,
        ONE=one, HEADS=block(heads), HALF=block(size // 2), num_warps=WARPS,
    )  # fmt: skip
    return out


for _name, _real in (("rotated_norm", rotated_norm), ("rotated_norm_back", rotated_norm_back)):
    _LIBRARY.define(_name + SCHEMAS[_name])
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"cotrain::{_name}", lambda x, *_: torch.empty_like(x), lib=_LIBRARY
    )
