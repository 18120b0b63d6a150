"""Experts of a decoder step on CUDA: nine launches a layer at most for generated tokens, for any number of adapters.

The router's choice stays on the device: rows are sorted there, and the host only has upper bounds of the tiles. So a step
with experts can be a CUDA graph. The kernels are those of `lora/fused/step_expert_programs.py`.

Rows of prompts have larger tiles than generated tokens. The kind of a row does not depend on its neighbours, and so
neither do its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.decoding.slot_pool import MIN_RANK, Slot, slot_layout
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.fused import step_expert_operators  # noqa: F401  # it registers the ops
from cotrain_workers.engine.lora.fused.expert_operators import most_tiles
from cotrain_workers.engine.lora.fused.step_expert_operators import PROMPT_ROWS, ROW_ROWS
from cotrain_workers.engine.routing import ExpertWeights
from cotrain_workers.engine.spec import Target

OPS = torch.ops.cotrain


class Units(NamedTuple):
    """Offsets of the matrices of gate, up and down of a layer's experts, in slots of rank 8 and of both kinds."""

    shared_a: list[int]
    own_a: list[int]
    shared_b: list[int]
    own_b: list[int]


def units_of(targets: Sequence[Target]) -> dict[str, Units]:
    """Return the units of each experts module by its name."""
    shared, own = (slot_layout(targets, MIN_RANK, per_expert=kind).offset_by_name for kind in (False, True))
    by_module: dict[str, list[str]] = {}
    for target in targets:
        if target.experts:
            by_module.setdefault(target.name.rpartition(".")[0], []).append(target.name)
    return {
        module: Units(*([by_name[name][side] for name in names] for side in (0, 1) for by_name in (shared, own)))
        for module, names in by_module.items()
    }


class Sizes(NamedTuple):
    """Properties of a step that its launches depend on."""

    rank: int = 0  # largest of its adapters
    has_shared: bool = False  # there are adapters with shared matrices
    has_own: bool = False  # there are adapters with matrices of single experts only


def sizes_of(slots: Iterable[Slot | None]) -> Sizes:
    """Return the properties of a step with these adapters."""
    layouts = {slot.pool.layout.kind for slot in slots if slot is not None}
    kinds = {is_own for _, is_own in layouts}
    return Sizes(max((rank for rank, _ in layouts), default=0), False in kinds, True in kinds)


class Kind(NamedTuple):
    """Rows with tiles of one height."""

    height: int
    tokens: int  # number of tokens, or an upper bound


def adapter_table(slots: Iterable[Slot | None], rows: int) -> np.ndarray:
    """Return the adapters of `rows` tokens, int64 `[4 * rows]`; those after the last of `slots` have none.

    It contains `entries` `[rows, 3]`: rank, address of the slot, and 1 if all matrices are of single experts. Then it
    contains `slots` `[rows]`: the first token with the same adapter.
    """
    table = np.zeros(4 * rows, np.int64)
    entries, numbers = table[: 3 * rows].reshape(rows, 3), table[3 * rows :]
    number_by_slot: dict[int, int] = {}
    start = 0
    for slot, same in groupby(slots):
        own = slice(start, start + len(list(same)))
        if slot is not None:
            rank, is_own = slot.pool.layout.kind
            entries[own] = rank, slot.address, is_own
        numbers[own] = number_by_slot.setdefault(id(slot), start)
        start = own.stop
    numbers[start:] = start
    return table


class StepExperts:
    """The experts of a step, with the adapter of each token. The adapters can be replaced, for a graph."""

    def __init__(
        self,
        units: Mapping[str, Units],
        sizes: Sizes,
        kinds: Sequence[Kind],
        is_prompt: torch.Tensor | None,
        table: torch.Tensor,
    ) -> None:
        """Compute tokens of some kinds; with two, `is_prompt` int32 `[T]` is 1 for tokens of the second.

        `table` int64 `[4 * T]` has the adapters of the tokens, from `adapter_table`.
        """
        self._units, self._sizes, self._kinds, self._is_prompt, self._table = units, sizes, kinds, is_prompt, table

    def replace(self, slots: Sequence[Slot | None]) -> None:
        """Replace the adapters of the tokens. They must have the same sizes."""
        table = adapter_table(slots, len(self._table) // 4)
        self._table.copy_(to_device(table, self._table.device), non_blocking=True)

    def compute(
        self, name: str, base: ExpertWeights, x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Map `x` `[T, width]` to the weighted sums of each token's experts `index` `[T, k]` of a layer."""
        x, shares = x.contiguous(), shares.contiguous()
        units, edge = self._units[name], 3 * len(x)
        entries, slots = self._table[:edge].view(-1, 3), self._table[edge:]
        rank, has_shared, has_own = self._sizes
        experts, (tokens, chosen) = len(base.down), index.shape
        positions, rows, bounds = OPS.step_rows(index, self._is_prompt, slots, experts)
        tiles = [
            OPS.expert_tiles(
                bounds[at * experts : (at + 1) * experts + 1],
                most_tiles(kind.tokens * chosen, experts, kind.height),
                kind.height,
            )
            for at, kind in enumerate(self._kinds)
        ]

        def expand(
            x: torch.Tensor,
            weights: list[torch.Tensor],
            biases: list[torch.Tensor],
            gate: int,
            low: torch.Tensor,
            b: list[int],
            *,
            plus: bool,
        ) -> torch.Tensor:
            y = x.new_empty(tokens * chosen, weights[0].shape[1])
            for kind, own in zip(self._kinds, tiles, strict=True):
                OPS.step_expand(x, weights, biases, gate, low, shares, rows, own, entries, b, plus, kind.height, y)
            return y

        low = x.new_empty(tokens * (1 + chosen) if has_own else tokens, 2 * rank)
        if has_shared:
            OPS.step_shrink(x, None, slots, entries, units.shared_a[:2], 2, rank, low)
        if has_own:
            OPS.step_shrink(x, rows, rows[2], entries, units.own_a[:2], 2, rank, low)
        b = [*units.shared_b[:2], *units.own_b[:2]]
        inner = expand(x, base.gate_and_up, base.gate_biases, base.gate, low, b, plus=rank > 0)
        low = x.new_empty(tokens * chosen, rank)
        if rank:
            OPS.step_shrink(inner, rows, rows[2], entries, [units.shared_a[2], units.own_a[2]], 1, rank, low)
        y = expand(inner, [base.down], base.down_biases, 0, low, [0, 0, units.own_b[2], 0], plus=has_own)
        out: torch.Tensor = OPS.step_combine(y, low, positions, shares, slots, entries, units.shared_b[2])
        return out


def experts_of_step(
    units: Mapping[str, Units],
    slots: Sequence[Slot | None],
    is_prompt: Sequence[bool],
    rows: int,
    device: torch.device,
    sizes: Sizes | None = None,
) -> StepExperts:
    """Return the experts of tokens with their adapters and kinds, padded to `rows` by generated tokens without adapters.

    `sizes` are bounds for adapters that may replace them.
    """
    prompts = sum(is_prompt)
    counts = {ROW_ROWS: rows - prompts, PROMPT_ROWS: prompts}
    kinds = [Kind(height, tokens) for height, tokens in counts.items() if tokens]
    second = None
    if len(kinds) > 1:
        second = to_device(np.array([*is_prompt, *[False] * (rows - len(is_prompt))], np.int32), device)
    table = to_device(adapter_table(slots, rows), device)
    return StepExperts(units, sizes or sizes_of(slots), kinds, second, table)
