"""Work of a group's members in lock step: passes of the base model in the same order, and orders of the first member.

Before each pass, every member requests a kind of pass, and the greatest kind runs (`engine/coordination.py`). A
member that requested another kind, or none, runs a filler pass: 16 zero tokens, whose results no run uses.

The first member sends orders to the others, the followers. An order is a function of a follower's engine and lock
step, with its other arguments. Its answer is the result and the state of the follower after it. The order None ends
the follower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import structlog
import torch

from cotrain_store.failpoints import failpoint
from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.coordination import Forward, Yielding, run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.host import resident_bytes
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.model.base_model import BaseModel, hidden_states, token_row
from cotrain_workers.engine.ops import CycleOutput, Op, OpId
from cotrain_workers.engine.routing import Route, Segment, SequenceTable
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.group.processes import GroupLost, Links

log = structlog.get_logger()

FILLER_TOKENS = 16
Order: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...]]"


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
        allowances: Mapping[OpId, int],
        is_over: Callable[[], bool] | None,
    ) -> Yielding[CycleOutput]:
        """Run this member's part of a cycle, then filler passes until all members have finished theirs.

        Only the first member passes `is_over`. The others pass None and stop with the first one.
        """
        self._is_over_here, self._is_over_at_first = is_over or (lambda: False), False
        try:
            output = yield from engine.cycle(ops, allowances, is_over or (lambda: self._is_over_at_first))
            while (agreed := self._agree(Forward.NONE)) is not Forward.NONE:
                self._run_filler(agreed)
                yield
        finally:
            self._is_over_here = lambda: False
        return output

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


@dataclass(frozen=True)
class MemberFacts:
    """State of one member."""

    runs: frozenset[str]
    open_passes: frozenset[OpId]  # ids of open passes, as (run, seq)
    by_tier: Mapping[str, tuple[int, int]]  # same format as `AdapterBank.by_tier`
    offloaded: int
    runs_to_evict: Sequence[str]  # same format as `AdapterBank.runs_to_evict`
    memory_bytes: int  # resident memory of the member's process in bytes

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the member's adapters in all tiers."""
        return sum(size for _, size in self.by_tier.values())


class Followers:
    """Followers of a group, as the first member sees them: it sends orders, and keeps the state of each answer.

    For the first member's main thread; any thread may read `facts` and `lost`.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.lost: str | None = None  # reason why this group cannot continue
        self._facts: dict[int, MemberFacts] = {}
        self.send(dict.fromkeys(links.others, (do_nothing, ())))  # any answer contains the facts
        self.collect()

    @property
    def facts(self) -> list[MemberFacts]:
        """State of each follower, as of its last answer."""
        return [self._facts[number] for number in self._links.others]

    def call(self, member: int, method: Callable[..., Any], *args: object) -> Any:
        """Return the result of a function of the adapter bank of one member.

        Raises:
            GroupLost: the member has ended or does not answer.
        """
        self.send({member: (call_bank, (method, *args))})
        return self.collect()[member]

    def send(self, orders: Mapping[int, Order | None]) -> None:
        """Send orders without a wait; `collect` waits for the answers. Raises GroupLost."""
        self._refuse_if_lost()
        self._asked = tuple(orders)
        try:
            for member, order in orders.items():
                self._links.order(member, order)
        except RuntimeError as error:
            raise self.lose(error) from error

    def collect(self) -> dict[int, Any]:
        """Wait for the answers and return the results. Raises GroupLost."""
        self._refuse_if_lost()
        results = {}
        try:
            for member in self._asked:
                results[member], self._facts[member] = self._links.await_answer(member)
        except RuntimeError as error:
            raise self.lose(error) from error
        return results

    def end(self) -> None:
        """Order all members to end; log a warning if the group is already lost."""
        try:
            self.send(dict.fromkeys(self._links.others))
        except GroupLost as lost:
            log.warning("group_ended_without_its_members", reason=str(lost))

    def lose(self, error: BaseException) -> GroupLost:
        """Return the error for a failed group. From now on every order raises it."""
        self.lost = self.lost or f"{type(error).__name__}: {error}"
        return GroupLost(self.lost)

    def _refuse_if_lost(self) -> None:
        if self.lost:
            raise GroupLost(self.lost)


def facts_of(engine: Engine) -> MemberFacts:
    """Return the state of a member; valid between cycles."""
    adapters = engine.adapters
    return MemberFacts(
        runs=adapters.runs,
        open_passes=engine.open_passes.ids,
        by_tier=adapters.by_tier,
        offloaded=adapters.offloaded,
        runs_to_evict=adapters.runs_to_evict(),
        memory_bytes=resident_bytes(),
    )


def follow(engine: Engine, lock_step: GroupLockStep) -> None:
    """Execute orders until the order to end. After any exception the group cannot continue."""
    links = lock_step.links
    while order := links.await_order():
        function, args = order
        links.answer((function(engine, lock_step, *args), facts_of(engine)))


def do_nothing(engine: Engine, lock_step: GroupLockStep) -> None:
    """Do nothing: the answer reports the state of the follower."""


def call_bank(engine: Engine, _: GroupLockStep, method: Callable[..., Any], *args: object) -> Any:
    """Return the result of a function of this member's adapter bank."""
    return method(engine.adapters, *args)


def run_cycle(
    engine: Engine, lock_step: GroupLockStep, ops: Sequence[Op], allowances: Mapping[OpId, int]
) -> CycleOutput:
    """Run ops in lock step with the other members and return their output. `ops` may be empty."""
    return run_to_end(lock_step.run(engine, ops, allowances, None))
