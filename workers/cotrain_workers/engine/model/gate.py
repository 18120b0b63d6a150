"""The gated product of an MLP as one kernel, for decoding. In training it is part of the products, or plain."""

from __future__ import annotations

import torch

from cotrain_workers.engine.lora.fused.operators import GELU

BLOCK, WARPS = 1024, 4  # values of a program

_LIBRARY = torch.library.Library("cotrain", "FRAGMENT")
_LIBRARY.define("gated(Tensor gate, Tensor up, int kind) -> Tensor")


def gated(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    """Return `act(gate) * up`; `kind` is SILU or GELU."""
    product: torch.Tensor = torch.ops.cotrain.gated(gate.contiguous(), up.contiguous(), kind)
    return product


def _gated(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    from cotrain_workers.engine.model import layer_programs

    y = torch.empty_like(gate)
    layer_programs.gated[(-(-y.numel() // BLOCK),)](
        gate, up, y, y.numel(), GELU=kind == GELU, BLOCK=BLOCK, num_warps=WARPS
    )
    return y


_LIBRARY.impl("gated", _gated, "CompositeExplicitAutograd")
torch.library.register_fake("cotrain::gated", lambda gate, *_: torch.empty_like(gate), lib=_LIBRARY)
