"""The rotation of the heads of queries or keys, and their RMS norm before it if there is one: one kernel, one back."""

from __future__ import annotations

from typing import Any

import torch

from cotrain_workers.engine.model.kept_norm import WARPS, block

_LIBRARY = torch.library.Library("cotrain", "FRAGMENT")
_GIVEN = "Tensor? weight, Tensor cos, Tensor sin"
SCHEMAS = {
    # x [T, heads, size], cos and sin [T, size]; without a weight no norm; `one`: the scale is one more than it
    "rotated_norm": f"(Tensor x, {_GIVEN}, float eps, bool one) -> Tensor",
    "rotated_norm_back": f"(Tensor gy, Tensor? x, {_GIVEN}, float eps, bool one) -> Tensor",
}


class RotatedNorm(torch.autograd.Function):
    """`x` `[T, heads, size]`, each head normed, if there is a weight, and turned by `cos` and `sin` `[T, size]`.

    The weight is frozen. Without one the gradient does not need `x`, and it is not kept.
    """

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        one: bool,
    ) -> torch.Tensor:
        """Return the same shape."""
        x, cos, sin = (each.contiguous() for each in (x, cos, sin))
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin)
        ctx.rest = eps, one
        y: torch.Tensor = torch.ops.cotrain.rotated_norm(x, weight, cos, sin, eps, one)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        gy = grads[0].contiguous()
        gx = torch.ops.cotrain.rotated_norm_back(gy, *ctx.saved_tensors, *ctx.rest)
        return gx, *[None] * 5


def rotated_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    one: bool,
) -> torch.Tensor:
    """Return each head normed and turned."""
    return _run("rotated", [x, weight, cos, sin], eps, one, norm=weight is not None)


def rotated_norm_back(
    gy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    one: bool,
) -> torch.Tensor:
    """Return the gradient of `x`."""
    return _run("rotated_back", [x, weight, cos, sin, gy], eps, one, norm=weight is not None)


def _run(
    name: str, given: list[torch.Tensor | None], eps: float, one: bool, *, norm: bool
) -> torch.Tensor:
    from cotrain_workers.engine.model import layer_programs

    like = given[0] if given[0] is not None else given[-1]
    assert like is not None
    (rows, heads, size), out = like.shape, torch.empty_like(like)
    getattr(layer_programs, name)[(rows,)](
        *(like if each is None else each for each in given), out, heads, size // 2, eps,
        NORM=norm, ONE=one, HEADS=block(heads), HALF=block(size // 2), num_warps=WARPS,
    )  # fmt: skip
    return out


for _name, _real in (("rotated_norm", rotated_norm), ("rotated_norm_back", rotated_norm_back)):
    _LIBRARY.define(_name + SCHEMAS[_name])
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"cotrain::{_name}", lambda like, *_: torch.empty_like(like), lib=_LIBRARY
    )
