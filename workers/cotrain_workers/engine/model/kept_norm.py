"""RMS norm that also returns its input, so that backward of the norm and the residual is one kernel."""

from typing import Any

import torch

WARPS = 8

_LIBRARY = torch.library.Library("cotrain", "FRAGMENT")
SCHEMAS = {
    # x [T, width]; `one`: the scale is weight + 1
    "rms_norm": "(Tensor x, Tensor weight, float eps, bool one) -> Tensor",
    "rms_norm_back": "(Tensor x, Tensor weight, Tensor gy, Tensor? kept, float eps, bool one) -> Tensor",
}


class KeptNorm(torch.autograd.Function):
    """The norm of each row of `x` `[..., width]`, and `x` itself. The weight is frozen."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, one: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm and `x`."""
        ctx.save_for_backward(x, weight)
        ctx.rest = eps, one
        ctx.set_materialize_grads(False)  # an unused `x` has no gradient
        return torch.ops.cotrain.rms_norm(x.contiguous(), weight, eps, one), x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        x, weight = ctx.saved_tensors
        gy, kept = (None if each is None else each.contiguous() for each in grads)
        gx = torch.ops.cotrain.rms_norm_back(x.contiguous(), weight, gy, kept, *ctx.rest)
        return gx, None, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, one: bool) -> torch.Tensor:
    """Return the norm of each row."""
    y = torch.empty_like(x)
    _run("norm", x, weight, y, eps=eps, ONE=one)
    return y


def rms_norm_back(
    x: torch.Tensor, weight: torch.Tensor, gy: torch.Tensor, kept: torch.Tensor | None, eps: float, one: bool
) -> torch.Tensor:
    """Return the gradient of `x`, given the gradients of its norm and, if it was used, of `x` itself."""
    gx = torch.empty_like(x)
    given = x, weight, gy, gy if kept is None else kept, gx
    _run("norm_backward", *given, eps=eps, ONE=one, PLUS=kept is not None)
    return gx


def block(size: int) -> int:
    """Return the block size of a kernel for `size` values: the next power of two."""
    return 1 << (size - 1).bit_length()


def _run(name: str, x: torch.Tensor, *rest: torch.Tensor, eps: float, **flags: bool) -> None:
    from cotrain_workers.engine.model import layer_programs

    width = x.shape[-1]
    getattr(layer_programs, name)[(x.numel() // width,)](
        x, *rest, width, eps, **flags, BLOCK=block(width), num_warps=WARPS
    )


for _name, _real in (("rms_norm", rms_norm), ("rms_norm_back", rms_norm_back)):
    _LIBRARY.define(_name + SCHEMAS[_name])
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cotrain::{_name}", lambda x, *_: torch.empty_like(x), lib=_LIBRARY)
