"""Layers with a state: convolution and gated delta rule of each sequence of a packed row.

transformers computes a packed row as one sequence, so the state of a sequence would reach its neighbour. The
functions here replace the forward of such a layer, and its projections and norms remain those of the model.

A sequence is cut into blocks. Within a block the rule is a few products (Yang, Kautz, Hatamizadeh 2024,
"Gated Delta Networks"). The state passes from block to block, at once for all sequences. No value of a sequence is
multiplied into another one, and a product of a block has the same bits for every number of blocks. So the bits of
a run do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.routing import Router, SequenceTable, StatefulRows

BLOCK = 64  # rows, as in transformers
EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True)
class StateShape:
    """Values that one layer keeps of a sequence."""

    inputs: tuple[int, int]
    """Last inputs of the convolution, and their channels, in the type of the model."""
    matrices: tuple[int, int, int]
    """Heads, size of a key and size of a value, in fp32."""

    def sizes(self, item: int) -> int:
        """Return the number of bytes, for values of the model of `item` bytes."""
        return int(np.prod(self.inputs)) * item + int(np.prod(self.matrices)) * 4


class Move(NamedTuple):
    """Source row of each row; a row without a source is zero."""

    source: torch.Tensor  # int64 [n]
    empty: torch.Tensor | None  # bool [n], or None if each has a source


def move_of(index: np.ndarray, device: torch.device) -> Move:
    """Return the move of source rows `index` int64 `[n]`, where -1 is none."""
    empty = index < 0
    found = to_device(empty, device) if empty.any() else None
    return Move(to_device(np.maximum(index, 0), device), found)


def moved(x: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the rows of `x` `[m, ...]` as `[n, ...]`."""
    found = x.index_select(0, move.source)
    if move.empty is not None:
        found.masked_fill_(move.empty.view(-1, *[1] * (x.dim() - 1)), 0)
    return found


class Moved(torch.autograd.Function):
    """Rows of `x` in another place, each at most once. Its backward adds nothing, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to: Move, back: Move) -> torch.Tensor:  # type: ignore[explicit-override]
        """Return the rows."""
        ctx.back = back
        return moved(x, to)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        return moved(grads[0], ctx.back), None, None


class Run(NamedTuple):
    """Adjacent rows of one sequence, in parts that begin at a block."""

    row: int
    parts: Sequence[int]  # rows of each

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.parts)


@dataclass(frozen=True)
class Blocks:
    """Blocks of runs: first those that begin a run, of the runs with most blocks first, then the second ones."""

    to: Move  # packed rows in blocks, [blocks * BLOCK]
    back: Move  # rows of blocks in the packed row, [T]
    counts: Sequence[int]  # of first blocks, second blocks and so on
    order: Sequence[int]  # number of the run of each first block
    ends: Sequence[int]  # last block of each part, run by run

    @property
    def offsets(self) -> list[int]:
        """First block of each count."""
        return [0, *accumulate(self.counts)]


def blocks_of(runs: Sequence[Run], rows: int, device: torch.device) -> Blocks:
    """Return the blocks of runs within a packed row of `rows`."""
    cut = [
        [min(BLOCK, part - at) for part in run.parts for at in range(0, part, BLOCK)]
        for run in runs
    ]
    order = sorted(range(len(runs)), key=lambda run: -len(cut[run]))
    counts = [sum(len(own) > depth for own in cut) for depth in range(max(map(len, cut)))]
    offsets = [0, *accumulate(counts)]
    to, back = np.full((offsets[-1], BLOCK), -1), np.full(rows, -1)
    ranks = {run: rank for rank, run in enumerate(order)}
    ends = []
    for number, run in enumerate(runs):
        row, ended = run.row, 0
        for depth, size in enumerate(cut[number]):
            block = offsets[depth] + ranks[number]
            to[block, :size] = np.arange(row, row + size)
            back[row : row + size] = block * BLOCK + np.arange(size)
            row += size
        for part in run.parts:
            ended += -(-part // BLOCK)
            ends.append(offsets[ended - 1] + ranks[number])
    return Blocks(move_of(to.ravel(), device), move_of(back, device), counts, order, ends)


def by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    blocks: Blocks,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs `[T, heads, d_v]` and the states after each block `[blocks, heads, d_k, d_v]`, fp32.

    `q` and `k` are `[T, heads of keys, d_k]`, `v` is `[T, heads, d_v]`. The logarithmic decay `g` and the rates
    `beta` are `[T, heads]`; without rates, nothing is subtracted from `v`. `state` has the run of each first block.
    """
    heads = v.shape[1]

    def cut(x: torch.Tensor) -> torch.Tensor:  # [blocks, heads, BLOCK, ...]
        rows: torch.Tensor = Moved.apply(x.float(), blocks.to, blocks.back)  # type: ignore[no-untyped-call]  # torch gives it no types
        each = rows.view(-1, BLOCK, *x.shape[1:]).transpose(1, 2).contiguous()
        times = heads // each.shape[1]
        return each.repeat_interleave(times, dim=1) if times > 1 else each

    q, k, v, g = (cut(x) for x in (q, k, v, g))
    lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril()
    # Decay from one row to another: a sum of its own, because the difference of two long sums loses digits.
    steps = g[..., None].expand(-1, -1, -1, BLOCK).masked_fill(~lower.tril(-1), 0)
    decays = steps.cumsum(-2).masked_fill(~lower, -torch.inf).exp()
    since = g.cumsum(-1).exp()  # the decay since the block began
    olds = None
    if beta is not None:
        rates = cut(beta)[..., None]
        system = (k * rates) @ k.mT * decays
        v, olds = (
            torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
            for x in (v * rates, k * rates * since[..., None])
        )
    within = q @ k.mT * decays
    q, k = q * since[..., None], k * decays[..., -1, :, None]
    whole = since[..., -1, None, None]
    if state is None:
        state = q.new_zeros(blocks.counts[0], heads, q.shape[-1], v.shape[-1])
    outs, states = [], []
    for first, count in zip(blocks.offsets, blocks.counts, strict=False):
        own = slice(first, first + count)
        state = state[:count]
        new = v[own] if olds is None else v[own] - olds[own] @ state
        outs.append(q[own] @ state + within[own] @ new)
        state = state * whole[own] + k[own].mT @ new
        states.append(state)
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    rows: torch.Tensor = Moved.apply(out, blocks.back, blocks.to)  # type: ignore[no-untyped-call]  # torch gives it no types
    return rows, torch.cat(states)


def by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs `[n, heads, d_v]` of one token each, and the states after it `[n, heads, d_k, d_v]`, fp32.

    The arguments are those of `by_blocks`. No product of matrices is used, so bits do not depend on `n`.
    """
    heads = v.shape[1]
    q, k = (x.float().repeat_interleave(heads // x.shape[1], dim=1)[..., None] for x in (q, k))
    state = state * g.exp()[..., None, None]
    new = v.float()
    if beta is not None:
        new = (new - (state * k).sum(-2)) * beta.float()[..., None]
    state = state + k * new[..., None, :]
    return (state * q).sum(-2), state


class TrainingRows:
    """Whole sequences, which begin without a state."""

    def __init__(self, table: SequenceTable, taps: int) -> None:
        starts = [0, *accumulate(table.lengths)]
        runs = [
            Run(start, (length,))
            for start, length in zip(starts, table.lengths, strict=False)
            if length
        ]
        self._blocks = blocks_of(runs, starts[-1], table.device)
        at, left = (
            np.concatenate([np.arange(run.rows)[::step] for run in runs]) for step in (1, -1)
        )
        rows = np.arange(starts[-1])
        self._taps = [
            tuple(
                move_of(np.where(reach >= back, rows + sign * back, -1), table.device)
                for reach, sign in ((at, -1), (left, 1))
            )
            for back in range(1, taps)
        ]

    def before(self, layer: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the earlier rows of the same sequence."""
        return [Moved.apply(x, *each) for each in self._taps]  # type: ignore[no-untyped-call]  # torch gives it no types

    def scan(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor | None,
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
    weight = convolution.weight.squeeze(1).to(
        wide
    )  # [channels, taps], the last for the token itself
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


def project(
    module: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values side by side `[1, T, channels]`, the gate `[1, T, heads, d_v]`, b and a `[1, T, heads]`."""
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next
        *mixed, z, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        )
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
    v, k, q = x.split([inner, wide, wide], dim=-1)
    q, k = (each.unflatten(-1, (module.n_groups, -1)) for each in (q, k))
    v = v.unflatten(-1, (heads, -1)).float()
    dt = functional.softplus(dt.squeeze(0) + module.dt_bias.to(dt.dtype))
    dt = dt.clamp(*module.time_step_limit).float()
    g = -module.A_log.float().exp() * dt
    out = rows.scan(layer, q, k, v * dt[..., None], g, None) + module.D[:, None] * v
    out = out.flatten(1)[None]
    if isinstance(module.norm, nn.Identity):
        out = out * functional.silu(gate)
    else:
        out = module.norm(out, gate)
    return module.out_proj(out.to(hidden_states.dtype))  # type: ignore[no-any-return]


def short_convolution(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return the output of a gated convolution `[1, T, d]` of LFM2, each sequence alone."""
    b, c, x = module.in_proj(hidden_states).chunk(3, dim=-1)
    x = (b * x).squeeze(0)
    rows = rows_of(module.cotrain_router, module.conv_kernel_size)
    y = convolved(x, rows.before(module.cotrain_layer, x), module.conv, None)
    return module.out_proj(c * y[None])  # type: ignore[no-any-return]


def shape_of_gated_delta_net(module: Any) -> StateShape:
    """Return the shape of the state of a gated delta net."""
    return StateShape(
        (module.conv_kernel_size - 1, module.conv_dim),
        (module.num_v_heads, module.head_k_dim, module.head_v_dim),
    )


def shape_of_mamba(module: Any) -> StateShape:
    """Return the shape of the state of a Mamba 2 mixer."""
    return StateShape(
        (module.conv_kernel_size - 1, module.conv_dim),
        (module.num_heads, module.ssm_state_size, module.head_dim),
    )


def shape_of_convolution(module: Any) -> StateShape:
    """Return the shape of the state of a gated convolution, which has no matrices."""
    return StateShape((module.conv_kernel_size - 1, module.conv.in_channels), (0, 0, 0))


#: Forward and shape of each kind of layer with a state, by the name of its module in a decoder layer.
KINDS: Mapping[str, tuple[Callable[..., torch.Tensor], Callable[[Any], StateShape]]] = {
    "linear_attn": (gated_delta_net, shape_of_gated_delta_net),
    "mamba": (mamba, shape_of_mamba),
    "conv": (short_convolution, shape_of_convolution),
}


def attach(decoder: Any, router: Router) -> tuple[StateShape, ...]:
    """Replace the forward of the layers with a state by ours; return the shapes of their states."""
    shapes: list[StateShape] = []
    for layer in decoder.layers:
        for name, (forward, shape) in KINDS.items():
            module = getattr(layer, name, None)
            if module is not None:
                module.cotrain_router, module.cotrain_layer = router, len(shapes)
                module.forward = MethodType(forward, module)
                shapes.append(shape(module))
    return tuple(shapes)
