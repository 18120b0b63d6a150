"""Packed row of one decoder step: its work in the order of adapters, the LoRA of each row, and the route of both.

* `RowLora` is a batched product, each row with the matrices of its own adapter. On a CPU it is not slower than one
  product per segment, and its bits do not depend on the number of rows. With 64 rows, 256 -> 768 and rank 8 it takes
  23 us, against 32 us; the base takes 157 us.
* `KernelLora` (`lora_kernel.py`) has kernels for CUDA, which are compared with `RowLora`.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from cotrain_workers.engine.decoding.paged_attention import Span
from cotrain_workers.engine.decoding.sequence_pages import Plan, Work
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot
from cotrain_workers.engine.decoding.step_experts import StepExperts
from cotrain_workers.engine.lora.quantized import FrozenWeight, dense
from cotrain_workers.engine.model.experts import of_expert
from cotrain_workers.engine.routing import AttentionRule, ExpertRows, ExpertWeights, StatefulRows, bucket

FEWEST_ROWS = 16
LONG_RUN = 16  # rows of one adapter from which a separate call, which copies no matrix, is faster
GATHER_BYTES = 32 * 1024**2  # maximum copied for a call that serves several adapters
KEEP_BYTES = 128 * 1024**2  # maximum of copies cached for the next step, if it has the same rows

#: Slot of some weights, by their key; None, the base model alone, has none.
SlotOf = Callable[[str | None], Slot | None]


class Item(NamedTuple):
    """A page of a prompt or a generated token, with its position in the packed row."""

    work: Work
    span: Span
    slot: Slot | None


def arrange(plan: Plan, slot_of: SlotOf) -> list[Item]:
    """Return the work of a plan in one packed row, sorted by adapter; generated tokens are before prompts."""
    pairs = [(work, slot_of(work.sequence.group.request.weights)) for work in plan.work]
    pairs.sort(key=lambda pair: (slot_order(pair[1]), pair[0].is_prompt))
    starts = accumulate((work.stop - work.start for work, _ in pairs), initial=0)
    return [
        Item(work, Span(row, work.start, work.stop, work.sequence.pages), slot)
        for (work, slot), row in zip(pairs, starts, strict=False)
    ]


def slot_order(slot: Slot | None) -> tuple[tuple[int, bool], int]:
    """Return the sort key that groups rows by pool and adapter."""
    return ((0, False), 0) if slot is None else (slot.pool.layout.kind, slot.index)


def padded(rows: int) -> int:
    """Return the padded length of a step.

    A row of a product with a weight matrix has the same bits for every number of rows from 12 on (measured on CPU
    fp32). A minimum of 16 instead of 32 saves a quarter of the time of a step with few sequences.
    """
    return FEWEST_ROWS if rows <= FEWEST_ROWS else bucket(rows)


def looked_up(ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return token ids with negative ones replaced from `chosen` `[n]`: -1 is the first, -2 the second."""
    rows = (-1 - ids).clamp_(min=0)
    return chosen.index_select(0, rows.flatten()).view_as(ids).where(ids < 0, ids)


class Attention(Protocol):
    """Attention of a step, which also writes its keys and values."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape, each row within its own sequence."""


class Lora(Protocol):
    """LoRA of a step, with the adapter of each row."""

    def linear(
        self,
        module: str,
        x: torch.Tensor,
        weight: FrozenWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`, each row with its own adapter, plus `residual`, which is given up."""

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place."""


class MixedStep:
    """A `StepRoute` composed of attention and LoRA."""

    def __init__(
        self, attention: Attention, lora: Lora, states: StatefulRows | None = None, experts: StepExperts | None = None
    ) -> None:
        self._states = states
        self._experts = experts
        self._attention = attention
        self._lora = lora
        self._residuals: dict[str, torch.Tensor] = {}  # by the module to whose output they are added
        self._chosen: list[torch.Tensor] = []  # [T, k] of each layer with experts
        self.routes: torch.Tensor | None = None
        """Experts that routers chose, int16 `[T, layers, k]` on the device, once the model has run."""

    def experts(
        self, name: str, own: ExpertWeights, x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the weighted sums of each token's experts `index` `[T, k]`; None if no kernel computes them."""
        self._chosen.append(index)
        return None if self._experts is None else self._experts.compute(name, own, x, index, shares)

    def replace_adapters(self, items: Sequence[Item]) -> None:
        """Replace the adapters of the rows in experts, if there are any."""
        if self._experts is not None:
            self._experts.replace([item.slot for item in items])

    def end(self) -> None:
        """Complete the results after the last layer."""
        chosen, self._chosen = self._chosen, []
        self.routes = torch.stack(chosen, dim=1).to(torch.int16) if chosen else None

    def linear(self, module: str, x: torch.Tensor, weight: FrozenWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`, each row with its own adapter."""
        return self._lora.linear(module, x, weight, bias, self._residuals.pop(module, None))

    def add_to(self, module: str, residual: torch.Tensor) -> None:
        """Add `[1, T, out]` to the next output of `module`, which has no siblings; its memory may be overwritten."""
        self._residuals[module] = residual

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Rows (start, stop) of each adapter."""
        assert isinstance(self._lora, RowLora)  # with the others, kernels compute experts
        return self._lora.segments

    @property
    def states(self) -> StatefulRows:
        """Sequences of the step, for layers with a state."""
        assert self._states is not None
        return self._states

    def add_to_experts(self, module: str, x: torch.Tensor, y: torch.Tensor, groups: ExpertRows) -> None:
        """Add the LoRA path of rows of experts `x` `[P, in]` to `y` `[P, out]`, in place."""
        assert isinstance(self._lora, RowLora)
        self._lora.add_to_experts(module, x, y, groups)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape, each row within its own sequence."""
        return self._attention.attend(layer, q, k, v, rule)


class AdapterRows(NamedTuple):
    """Adjacent rows of one adapter."""

    start: int
    stop: int
    slot: Slot


class Gathered(NamedTuple):
    """Adjacent rows of several adapters of one pool."""

    start: int
    stop: int
    pool: Pool
    slots: torch.Tensor  # int64 [stop - start]
    modules: frozenset[str]  # modules that at least one of the adapters changes
    parts: Sequence[AdapterRows]


class RowLora:
    """Adapters of the rows of a step, which are sorted by adapter."""

    def __init__(self, slots: Sequence[Slot | None], device: torch.device) -> None:
        self._parts = list(adapter_rows(slots))
        self._long: list[AdapterRows] = []
        self._short: list[Gathered] = []
        self._kept: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self._free_bytes = KEEP_BYTES
        short: list[AdapterRows] = []
        for part in self._parts:
            if part.stop - part.start >= LONG_RUN:
                self._long.append(part)
            else:
                short.append(part)
        for group in _neighbours(short):
            if len(group) == 1:
                self._long.append(group[0])
            else:
                self._short.append(_gathered(group, device))

    def linear(
        self,
        module: str,
        x: torch.Tensor,
        weight: FrozenWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`, each row with its own adapter, plus `residual`."""
        y = functional.linear(x, dense(weight), bias)
        self.add(module, x[0], y[0])
        return y if residual is None else y.add_(residual)

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place."""
        for part in self._long:
            _add_part(part, module, x, y)
        for at, group in enumerate(self._short):
            if module not in group.modules:
                continue
            width = (group.stop - group.start) * group.pool.layout.rank
            size = width * (x.shape[1] + y.shape[1]) * x.element_size()
            if size > GATHER_BYTES:
                for part in group.parts:
                    _add_part(part, module, x, y)
            else:
                matrices = self._gather(at, module, size)
                _add_products(slice(group.start, group.stop), x, y, *matrices)

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Rows (start, stop) of each adapter."""
        return [(part.start, part.stop) for part in self._parts]

    def add_to_experts(self, module: str, x: torch.Tensor, y: torch.Tensor, groups: ExpertRows) -> None:
        """Add the LoRA path of rows of experts `x` `[P, in]` to `y` `[P, out]`, in place."""
        for part in self._parts:
            if module not in part.slot.modules:
                continue
            both = part.slot.pool.of_experts(module, part.slot.index)
            for expert, start, stop in groups[part.start]:
                a, b = (of_expert(each, expert).expand(stop - start, -1, -1) for each in both)
                _add_products(slice(start, stop), x, y, a, b)

    def _gather(self, at: int, module: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of a group's rows side by side, from the cache of an earlier step if possible."""
        kept = self._kept.get((at, module))
        if kept is not None:
            return kept
        found = self._short[at].pool.matrices(module, self._short[at].slots)
        if size <= self._free_bytes:
            self._free_bytes -= size
            self._kept[at, module] = found
        return found


def _add_part(part: AdapterRows, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add the LoRA path on the rows of one adapter."""
    if module in part.slot.modules:
        matrices = part.slot.pool.repeated(module, part.slot.index, part.stop - part.start)
        _add_products(slice(part.start, part.stop), x, y, *matrices)


def _add_products(rows: slice, x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `x_i A_i^T B_i` to each row `y_i`; `a` `[n, rank, in]`, `b` `[n, rank, padded out]`.

    A single row is computed twice, because a batch of one has other bits.
    """
    x = x[rows].unsqueeze(1)  # [n, 1, in]
    if len(x) == 1:
        x, a, b = (each.expand(2, -1, -1) for each in (x, a, b))
    low = torch.bmm(x, a.transpose(1, 2))  # [n, 1, rank]
    own = y[rows]  # `y[rows] += …` would copy the sum to itself
    own += torch.bmm(low, b)[: len(own), 0, : y.shape[1]]


def adapter_rows(slots: Sequence[Slot | None]) -> Iterator[AdapterRows]:
    """Yield the adjacent rows of each adapter; rows without an adapter are left out."""
    start = 0
    for slot, same in groupby(slots):
        stop = start + len(list(same))
        if slot is not None:
            yield AdapterRows(start, stop, slot)
        start = stop


def _neighbours(parts: Sequence[AdapterRows]) -> list[list[AdapterRows]]:
    """Group consecutive parts that share a pool."""
    groups: list[list[AdapterRows]] = []
    for part in parts:
        last = groups[-1][-1] if groups else None
        if last is not None and last.stop == part.start and last.slot.pool is part.slot.pool:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _gathered(group: Sequence[AdapterRows], device: torch.device) -> Gathered:
    """Return one gather for several short parts."""
    indices = [part.slot.index for part in group for _ in range(part.stop - part.start)]
    modules = frozenset[str]().union(*(part.slot.modules for part in group))
    slots = torch.tensor(indices, device=device)
    return Gathered(group[0].start, group[-1].stop, group[0].slot.pool, slots, modules, group)
