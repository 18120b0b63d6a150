"""Layers with a state instead of attention: gated delta nets, Mamba 2 and short convolutions.

transformers computes a packed row as one sequence, so the state of a sequence would reach its neighbour. The
functions here replace the forward of such a layer, and its projections and norms remain those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from cotrain_workers.engine.model.delta_rule import Moved, Run, blocks_of, by_blocks, move_of, size_for
from cotrain_workers.engine.routing import Router, SequenceTable, StatefulRows

EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True)
class StateShape:
    """Values that one layer keeps of a sequence."""

    inputs: tuple[int, int]  # last inputs of the convolution, and their channels, in the type of the model
    matrices: tuple[int, int, int]  # heads, size of a key and size of a value, in fp32

    def sizes(self, item: int) -> int:
        """Return the number of bytes, for values of the model of `item` bytes."""
        return int(np.prod(self.inputs)) * item + int(np.prod(self.matrices)) * 4


class TrainingRows:
    """Whole sequences, which begin without a state."""

    def __init__(self, table: SequenceTable, taps: int) -> None:
        starts = [0, *accumulate(table.lengths)]
        runs = [Run(start, (length,)) for start, length in zip(starts, table.lengths, strict=False) if length]
        self._blocks = blocks_of(runs, starts[-1], table.device, size_for)
        rows = np.arange(starts[-1])
        rows_before = np.concatenate([np.arange(run.rows) for run in runs])  # in the same sequence
        rows_after = np.concatenate([np.arange(run.rows)[::-1] for run in runs])
        self._taps = [
            (
                move_of(np.where(rows_before >= back, rows - back, -1), table.device),  # of the values
                move_of(np.where(rows_after >= back, rows + back, -1), table.device),  # of their gradients
            )
            for back in range(1, taps)
        ]

    def before(self, layer: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the earlier rows of the same sequence."""
        return [Moved.apply(x, *each) for each in self._taps]  # type: ignore[no-untyped-call]  # torch gives it no types

    def scan(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the outputs of sequences that begin with a state of zero."""
        return by_blocks(q, k, v, g, beta, self._blocks)[0]


def rows_of(router: Router, taps: int) -> StatefulRows:
    """Return the rows of the current route, for a convolution of `taps` tokens."""
    if router.step is not None:
        return router.step.states
    table = router.route.sequences
    if taps not in table.rows:
        table.rows[taps] = TrainingRows(table, taps)
    return table.rows[taps]


def convolved(
    x: torch.Tensor, before: Sequence[torch.Tensor], convolution: Any, activation: str | None
) -> torch.Tensor:
    """Return the causal convolution of each channel of `x` `[T, channels]`, after its activation."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = convolution.weight.squeeze(1).to(wide)  # [channels, taps], the last for the token itself
    y = x.to(wide) * weight[:, -1]
    for back, earlier in enumerate(before, start=2):
        y = y + earlier.to(wide) * weight[:, -back]
    if convolution.bias is not None:
        y = y + convolution.bias.to(wide)
    y = y.to(x.dtype)
    return ACT2FN[activation](y) if activation else y  # type: ignore[no-any-return]


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Return queries or keys `[T, heads, d]` of length one, fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def project(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values side by side `[1, T, channels]`, the gate, b and a.

    The gate is `[1, T, heads, d_v]`; b and a are `[1, T, heads]`.
    """
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next
        *mixed, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        return torch.cat([each.flatten(2) for each in mixed], dim=-1), z, b, a
    z = module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim))
    return module.in_proj_qkv(hidden), z, module.in_proj_b(hidden), module.in_proj_a(hidden)


def gated_delta_net(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the output of a gated delta net `[1, T, d]`, each sequence with its own state."""
    mixed, z, b, a = project(module, hidden_states)
    x, layer = mixed.squeeze(0), module.cotrain_layer
    rows = rows_of(module.cotrain_router, module.conv_kernel_size)
    x = convolved(x, rows.before(layer, x), module.conv1d, module.activation)
    q, k, v = torch.split(x, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
    q, k = (normalized(each.unflatten(-1, (-1, module.head_k_dim))) for each in (q, k))
    v = v.unflatten(-1, (-1, module.head_v_dim))
    g = -module.A_log.float().exp() * functional.softplus(a.float() + module.dt_bias)
    scaled = q * module.head_k_dim**-0.5
    out = rows.scan(layer, scaled, k, v, g.squeeze(0), b.sigmoid().squeeze(0)).to(x.dtype)
    gated = module.norm(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    return module.out_proj(gated.view(*hidden_states.shape[:2], -1))  # type: ignore[no-any-return]


def mamba(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the output of a Mamba 2 mixer `[1, T, d]`, each sequence with its own state (Dao, Gu 2024)."""
    projected = module.in_proj(hidden_states * getattr(module, "ssm_in_multiplier", 1))
    projected = projected * getattr(module, "mup_vector", 1)  # Falcon-H1
    inner, heads = module.intermediate_size, module.num_heads
    gate, x, dt = projected.split([inner, module.conv_dim, heads], dim=-1)
    x, layer = x.squeeze(0), module.cotrain_layer
    rows = rows_of(module.cotrain_router, module.conv_kernel_size)
    x = convolved(x, rows.before(layer, x), module.conv1d, module.activation)
    wide = module.n_groups * module.ssm_state_size
    v, k, q = x.split([inner, wide, wide], dim=-1)  # x, B and C of Mamba, in the names of linear attention
    q, k = (each.unflatten(-1, (module.n_groups, -1)) for each in (q, k))
    v = v.unflatten(-1, (heads, -1)).float()
    dt = functional.softplus(dt.squeeze(0) + module.dt_bias.to(dt.dtype))
    dt = dt.clamp(*module.time_step_limit).float()
    g = -module.A_log.float().exp() * dt
    out = rows.scan(layer, q, k, v * dt[..., None], g, None) + module.D[:, None] * v
    out = out.flatten(1)[None]
    out = out * functional.silu(gate) if isinstance(module.norm, nn.Identity) else module.norm(out, gate)
    return module.out_proj(out.to(hidden_states.dtype))  # type: ignore[no-any-return]


def short_convolution(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the output of a gated convolution `[1, T, d]` of LFM2, each sequence alone."""
    b, c, x = module.in_proj(hidden_states).chunk(3, dim=-1)
    x = (b * x).squeeze(0)
    rows = rows_of(module.cotrain_router, module.conv_kernel_size)
    y = convolved(x, rows.before(module.cotrain_layer, x), module.conv, None)
    return module.out_proj(c * y[None])  # type: ignore[no-any-return]


#: Forward of each kind of layer with a state, by the name of its module in a decoder layer. Then the channels of its
#: convolution, and heads, size of a key and size of a value of its matrices.
KINDS: Mapping[str, tuple[Callable[..., torch.Tensor], str, tuple[str, ...]]] = {
    "linear_attn": (gated_delta_net, "conv_dim", ("num_v_heads", "head_k_dim", "head_v_dim")),
    "mamba": (mamba, "conv_dim", ("num_heads", "ssm_state_size", "head_dim")),
    "conv": (short_convolution, "conv.in_channels", ()),
}


def state_shape(module: Any, channels: str, matrices: tuple[str, ...]) -> StateShape:
    """Return the shape of the state of a layer; a gated convolution has no matrices."""
    heads, keys, values = (getattr(module, name) for name in matrices) if matrices else (0, 0, 0)
    inputs = (module.conv_kernel_size - 1, attrgetter(channels)(module))
    return StateShape(inputs, (heads, keys, values))


def attach(decoder: Any, router: Router) -> tuple[StateShape, ...]:
    """Replace the forward of the layers with a state by ours; return the shapes of their states."""
    shapes: list[StateShape] = []
    for layer in decoder.layers:
        for name, (forward, channels, matrices) in KINDS.items():
            module = getattr(layer, name, None)
            if module is not None:
                module.cotrain_router, module.cotrain_layer = router, len(shapes)
                module.forward = MethodType(forward, module)
                shapes.append(state_shape(module, channels, matrices))
    return tuple(shapes)
