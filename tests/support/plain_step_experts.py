"""Plain code of the kernels of experts in a decoder step, which reads matrices at their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from cotrain_workers.engine.lora.fused.operators import SILU
from cotrain_workers.engine.spec import aligned


def matrix(entry: torch.Tensor, unit: int, expert: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """Return A or B^T `[rank, width]` of an expert in a slot, in fp32."""
    rank, address, _ = entry.tolist()
    size = like.element_size()
    at = address + size * (rank // 8 * unit + expert * rank * width)
    values = (ctypes.c_char * (rank * width * size)).from_address(at)
    return torch.frombuffer(values, dtype=like.dtype).view(rank, width).float()


def sort_rows(index: torch.Tensor, kinds: torch.Tensor | None, slots: torch.Tensor, experts: int) -> list[torch.Tensor]:
    """Return the row of each pair, the table of rows, and the first row of each expert of each kind."""
    tokens, chosen = index.shape
    keys = index.flatten().long()
    groups = experts
    if kinds is not None:
        keys, groups = keys + experts * kinds.repeat_interleave(chosen), 2 * experts
    order = keys.sort(stable=True).indices
    of_tokens = slots.long().repeat_interleave(chosen)
    rows = torch.stack([order, index.flatten()[order], of_tokens[order]]).int()
    bounds = torch.searchsorted(keys[order], torch.arange(groups + 1)).int()[:, None]
    assert len(slots) == tokens
    return [order.argsort().int(), rows, bounds]


def tiles(bounds: torch.Tensor, count: int, height: int) -> torch.Tensor:
    """Return the tiles of `height` rows."""
    edges = bounds[:, 0].tolist()
    spans = enumerate(pairwise(edges))
    found = [(each, first, stop, 0, 0) for each, (start, stop) in spans for first in range(start, stop, height)]
    assert len(found) <= count
    filler = [(0, 0, 0, 0, 0)] * (count - len(found))
    return torch.tensor([*found, *filler, (len(found), 0, 0, 0, 0)], dtype=torch.int32)


def shrink(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    slots: torch.Tensor,
    entries: torch.Tensor,
    units: Sequence[int],
    modules: int,
    rank: int,
    low: torch.Tensor,
) -> None:
    """Write the LoRA columns of modules next to each other."""
    for at, slot in enumerate(slots.tolist()):
        own, _, kind = entries[slot].tolist()
        assert own <= rank
        if own == 0 or (modules > 1 and kind != (rows is not None)):
            continue
        of_tokens = modules > 1 and rows is not None
        source = int(rows[0, at]) // (len(slots) // len(x)) if of_tokens and rows is not None else at
        expert = 0 if rows is None else int(rows[1, at])
        for module in range(modules):
            unit = units[module] if modules > 1 else units[kind]
            a = matrix(entries[slot], unit, expert, x.shape[1], low)
            to = at + len(x) if of_tokens else at
            low[to, module * own : (module + 1) * own] = (a @ x[source].float()).to(low.dtype)


def expand(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    gate: int,
    low: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    of_tiles: torch.Tensor,
    entries: torch.Tensor,
    units: Sequence[int],
    plus: bool,  # arguments of ops are positional
    height: int,
    y: torch.Tensor,
) -> None:
    """Write the products of the rows in tiles with the weights of their experts."""
    width = weights[0].shape[1]
    for expert, first, stop, *_ in of_tiles[: int(of_tiles[-1, 0])].tolist():
        for row in range(first, min(first + height, stop)):
            pair, of_row, slot = rows[:, row].tolist()
            assert of_row == expert
            token = pair // shares.shape[1]
            rank, _, kind = entries[slot].tolist()
            found = []
            for module, weight in enumerate(weights):
                value = weight[expert].float() @ x[token if gate else row].float()
                if biases:
                    value += biases[module][expert].float()
                if plus and rank and (gate or kind):
                    b = matrix(entries[slot], units[2 * kind + module], expert, aligned(width), low)[:, :width]
                    at = row if not gate else len(shares) + row if kind else token
                    value += low[at, module * rank : (module + 1) * rank].float() @ b
                found.append(value)
            if gate:
                first_value = found[0].to(y.dtype).float()
                act = functional.silu(first_value) if gate == SILU else functional.gelu(first_value, approximate="tanh")
                y[row] = (act.to(y.dtype).float() * found[1].to(y.dtype).float()).to(y.dtype)
            else:
                y[row] = (found[0] * shares.flatten()[pair].float()).to(y.dtype)


def combine(
    y: torch.Tensor,
    low: torch.Tensor,
    positions: torch.Tensor,
    shares: torch.Tensor,
    slots: torch.Tensor,
    entries: torch.Tensor,
    unit: int,
) -> torch.Tensor:
    """Return the sum over each token's experts, with a B that the experts share."""
    own = positions.view(shares.shape).long()
    total = y[own].float().sum(1)
    for token, slot in enumerate(slots.tolist()):
        rank, _, kind = entries[slot].tolist()
        if rank and not kind:
            b = matrix(entries[slot], unit, 0, aligned(y.shape[1]), y)[:, : y.shape[1]]
            total[token] += shares[token].float() @ low[own[token], :rank].float() @ b
    return total.to(y.dtype)


PLAYED: dict[str, Any] = {
    "cotrain.step_rows": sort_rows,
    "cotrain.expert_tiles": tiles,
    "cotrain.step_shrink": shrink,
    "cotrain.step_expand": expand,
    "cotrain.step_combine": combine,
}
