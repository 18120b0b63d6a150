"""Work of one decoder step, arranged in a packed row, and the route of its rows."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional

from cotrain_workers.engine.decoding.paged_attention import Span
from cotrain_workers.engine.decoding.row_lora import RowLora
from cotrain_workers.engine.decoding.sequence_pages import Plan, Work
from cotrain_workers.engine.decoding.slot_pool import Slot
from cotrain_workers.engine.routing import AttentionRule, ExpertRows, StatefulRows, bucket

FEWEST_ROWS = 16


class Attention(Protocol):
    """Attention of a step, which also writes its keys and values."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape, each row within its own sequence."""


class Lora(Protocol):
    """LoRA of a step, with the adapter of each row."""

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place."""


class MixedStep:
    """A `StepRoute` composed of attention and LoRA."""

    def __init__(self, attention: Attention, lora: Lora, states: StatefulRows | None = None) -> None:
        self._states = states
        self._attention = attention
        self._lora = lora
        self._x: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self.experts: list[np.ndarray] = []  # [T, k] of each layer with experts

    def note_experts(self, chosen: np.ndarray) -> None:
        """Record the experts `[T, k]` that the router of the next layer has chosen."""
        self.experts.append(chosen.astype(np.int16))

    def linear(self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`, each row with its own adapter."""
        y = functional.linear(x, weight, bias)
        if self._rows is None or self._x is not x:
            self._x, self._rows = (x, x[0])  # siblings get the identical tensor, which `Lora` compares
        self._lora.add(module, self._rows, y[0])
        return y

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Rows (start, stop) of each adapter."""
        assert isinstance(self._lora, RowLora)  # the others do not compute experts
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


class Item(NamedTuple):
    """A page of a prompt or a generated token, with its position in the packed row."""

    work: Work
    span: Span
    slot: Slot | None


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


def slot_order(slot: Slot | None) -> tuple[tuple[int, bool], int]:
    """Return the sort key that groups rows by pool and adapter."""
    return (((0, False), 0)) if slot is None else (slot.pool.layout.kind, slot.index)


def arrange(plan: Plan, slot_of: Mapping[str | None, Slot | None]) -> list[Item]:
    """Return the work of a plan in one packed row, sorted by adapter; generated tokens are before prompts."""
    pairs = [(work, slot_of[work.sequence.group.request.weights]) for work in plan.work]
    pairs.sort(key=lambda pair: (slot_order(pair[1]), pair[0].is_prompt))
    starts = accumulate((work.stop - work.start for work, _ in pairs), initial=0)
    return [
        Item(work, Span(row, work.start, work.stop, work.sequence.pages), slot)
        for (work, slot), row in zip(pairs, starts, strict=False)
    ]
