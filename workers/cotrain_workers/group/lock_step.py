"""Lock-step of a group: all members run the same kinds of passes of the base model in the same order.

Before each pass, every member requests a kind of pass, and the greatest kind runs (`engine/coordination.py`). A
member that requested another kind, or none, runs a filler pass: 16 zero tokens, whose results no run uses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from cotrain_store.failpoints import failpoint
from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.coordination import Forward, Yielding
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.model.base_model import BaseModel, hidden_states, token_row
from cotrain_workers.engine.ops import CycleOutput, Op
from cotrain_workers.engine.routing import Route, Segment, SequenceTable
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.group.links import Links

FILLER_TOKENS = 16


class GroupLockStep:
    """Implementation of `LockStep` for one member."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._name = f"member-{links.number}"
        self._filler: Filler | None = None
        self._is_over_here: Callable[[], bool] = lambda: False
        """Deadline of the cycle; only the first member has one."""
        self._is_over_at_first = False
        """True if the first member's deadline had passed at the last pass."""

    @property
    def sharding(self) -> str:
        """Description of the sharding of the base model."""
        return f"fsdp2/{self.links.size}"

    def use_for_fillers(self, base: BaseModel) -> None:
        """Use this base model for filler passes from now on."""
        self._filler = Filler(base)

    def await_pass(self, wanted: Forward) -> Forward:
        """Run filler passes until the group agrees on the wanted kind, and return the kind to run.

        It differs from `wanted` only between BACKWARD and RECOMPUTED.
        """
        while True:
            agreed = self._agree(wanted)
            if agreed == wanted or (agreed.goes_back and wanted.goes_back):
                failpoint("group.before_pass", self._name)
                return agreed
            self._run_filler(agreed)

    def run(
        self,
        engine: Engine,
        ops: Sequence[Op],
        allowances: Mapping[tuple[str, int], int],
        is_over: Callable[[], bool] | None,
    ) -> Yielding[CycleOutput]:
        """Run this member's part of a cycle, then filler passes until all members have finished theirs.

        Only the first member passes `is_over`. The others pass None and stop with the first one.
        """
        with self._deadline(is_over):
            stop = is_over or (lambda: self._is_over_at_first)
            output = yield from engine.cycle(ops, allowances, stop)
            while (agreed := self._agree(Forward.NONE)) is not Forward.NONE:
                self._run_filler(agreed)
                yield
        return output

    @contextmanager
    def _deadline(self, is_over: Callable[[], bool] | None) -> Iterator[None]:
        self._is_over_here, self._is_over_at_first = is_over or (lambda: False), False
        try:
            yield
        finally:
            self._is_over_here = lambda: False

    def _agree(self, wanted: Forward) -> Forward:
        """Return the greatest kind that any member requests. All members must call it at the same time."""
        kind, is_over = self.links.agree(wanted, self._is_over_here())
        self._is_over_at_first = bool(is_over)
        return Forward(kind)

    def _run_filler(self, kind: Forward) -> None:
        assert self._filler is not None
        failpoint("group.before_pass", self._name)
        self._filler.run(kind)


class Filler:
    """Filler pass of a base model. An adapter in each layer makes its backward as deep as that of any run."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        weight = base.head_weight
        bank = AdapterBank(base.targets, weight.device, weight.dtype)
        spec = AdapterSpec(rank=1, seed=0, train_mlp=False, train_unembed=False)
        self._adapter = bank.create("filler", spec)

    def run(self, kind: Forward) -> None:
        """Run a filler pass of this kind."""
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
