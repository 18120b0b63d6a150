"""All members of a group run the same passes of the base model; one that has nothing to run goes along.

Before each pass the members say what they want next; the greatest kind goes first (`engine/lock_step.py`), and
those that want another, or nothing, run 16 zero tokens instead, whose results no run ever sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from cotrain_store.failpoints import failpoint
from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.cycle import Yielding
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lock_step import Forward
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.forward import hidden_states, token_row
from cotrain_workers.engine.ops import CycleOutput, Op
from cotrain_workers.engine.routing import Route, Segment, SequenceTable
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.group.links import Links

FILLER_TOKENS = 16


class GroupLockStep:
    """Implements `LockStep` for one member."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._name = f"member-{links.number}"
        self._filler: Filler | None = None
        self._deadline_passed: Callable[[], bool] = lambda: False
        self.is_over = False
        """Whether the first member's time for this cycle is over, as of the last pass."""

    @property
    def sharding(self) -> str:
        """Name how the base model is held."""
        return f"fsdp2/{self._links.size}"

    def fill_with(self, base: BaseModel) -> None:
        """Go along with this base model from now on."""
        self._filler = Filler(base)

    def await_pass(self, wanted: Forward) -> Forward:
        """Go along until it is the turn of this kind; return it, or a backward with recomputing."""
        while True:
            agreed = self._agree(wanted)
            if agreed == wanted or (agreed.goes_back and wanted.goes_back):
                failpoint("group.before_pass", self._name)
                return agreed
            self._go_along(agreed)

    def run(
        self,
        engine: Engine,
        ops: Sequence[Op],
        allowances: Mapping[tuple[str, int], int],
        is_over: Callable[[], bool] | None,
    ) -> Yielding[CycleOutput]:
        """Run this member's part of a cycle, then go along until all have ended theirs.

        `is_over` is the first member's; the others give None, and stop with it.
        """
        with self._limited(is_over):
            output = yield from engine.cycle(ops, allowances, is_over or (lambda: self.is_over))
            while (agreed := self._agree(Forward.NONE)) is not Forward.NONE:
                self._go_along(agreed)
                yield
        return output

    @contextmanager
    def _limited(self, is_over: Callable[[], bool] | None) -> Iterator[None]:
        self._deadline_passed, self.is_over = is_over or (lambda: False), False
        try:
            yield
        finally:
            self._deadline_passed = lambda: False

    def _agree(self, wanted: Forward) -> Forward:
        kind, is_over = self._links.agree(wanted, self._deadline_passed())
        self.is_over = bool(is_over)
        return Forward(kind)

    def _go_along(self, kind: Forward) -> None:
        assert self._filler is not None
        failpoint("group.before_pass", self._name)
        self._filler.run(kind)


class Filler:
    """A pass of a base model for no run, with an adapter in each layer so that it goes back as far as any."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        weight = base.head_weight
        bank = AdapterBank(base.targets, weight.device, weight.dtype)
        spec = AdapterSpec(rank=1, seed=0, train_mlp=False, train_unembed=False)
        self._adapter = bank.create("filler", spec)

    def run(self, kind: Forward) -> None:
        """Run it as a pass of this kind."""
        base, adapter = self._base, self._adapter
        row = token_row([[np.zeros(FILLER_TOKENS, np.int64)]], FILLER_TOKENS)
        grads = adapter.gradient.views if kind.goes_back else None
        segments = [Segment(0, FILLER_TOKENS, adapter, adapter.spec.scale, grads)]
        table = SequenceTable(row.lengths, base.head_weight.device)
        base.recompute.is_on = kind is Forward.RECOMPUTED
        with base.router.use(Route(segments, table, SegmentLora(segments))):
            with torch.set_grad_enabled(kind.goes_back):
                hidden = hidden_states(base, row)
            if kind.goes_back:
                hidden.backward(torch.zeros_like(hidden))
