"""Engine of a group, with the interface of `Engine`. Each run's ops go to the member with its adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, TypeAlias

import structlog
import torch

from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.adapters.copies import AdapterState, HostArenas, StateCopy
from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.engine import Engine, ProcessUse
from cotrain_workers.engine.facts import ModelFacts
from cotrain_workers.engine.ops import Create, CycleOutput, Import, Op, OpId, UpcomingBatch, begins_run
from cotrain_workers.engine.spec import Target
from cotrain_workers.group.lock_step import Followers, GroupLockStep, MemberFacts, facts_of, run_cycle
from cotrain_workers.group.processes import GroupLost

log = structlog.get_logger()


class GroupEngine:
    """Stand-in of `Engine` for the first member. Not thread-safe.

    An exception of any member leaves the others in the middle of a pass. It therefore ends the group and this
    process (GroupLost). The next group finds the open step and its crash count.
    """

    def __init__(self, own: Engine, lock_step: GroupLockStep) -> None:
        self._own = own
        self._lock_step = lock_step
        self.facts: ModelFacts = own.facts
        self.targets: Sequence[Target] = own.targets
        self.followers = Followers(lock_step.links)
        self.adapters = GroupBank(own, self.followers)
        self.open_passes = GroupOpenPasses(self.adapters)

    def run(self, ops: Sequence[Op]) -> CycleOutput:
        """Run one cycle to its end; see `cycle`."""
        return run_to_end(self.cycle(ops))

    def cycle(
        self,
        ops: Sequence[Op],
        allowances: Mapping[OpId, int] = MappingProxyType({}),
        is_over: Callable[[], bool] = lambda: False,
    ) -> Yielding[CycleOutput]:
        """Run one cycle like `Engine.cycle`, on all members at once. Raises GroupLost."""
        own, *others = [
            (share, {op: n for op, n in allowances.items() if op[0] in {o.run for o in share}})
            for share in self.adapters.shares(ops)
        ]
        self.followers.send({n: (run_cycle, other) for n, other in enumerate(others, start=1)})
        try:
            output = yield from self._lock_step.run(self._own, *own, is_over)
        except BaseException as error:
            raise self.followers.lose(error) from error
        return together([output, *self.followers.collect().values()])

    def watch_micro_batches(self, watch: Callable[[UpcomingBatch], AbstractContextManager[None]]) -> None:
        """Do nothing: each member has its own micro-batches, and the end of any member ends the group."""

    def spare_memory(self, tokens: int) -> None:
        """Do nothing: all members must run the same kinds of passes."""

    def check_device(self) -> None:
        """Raise DeviceLost if the device or the group has failed."""
        if self.followers.lost:
            raise GroupLost(self.followers.lost)
        self._own.check_device()

    @property
    def processes(self) -> Sequence[ProcessUse]:
        """Runs and memory of each member; of the others as of their last answers. Any thread may read it."""
        others = [ProcessUse(len(each.runs), each.memory_bytes) for each in self.followers.facts]
        return (*self._own.processes, *others)

    @property
    def halvings(self) -> int:
        """Number of halved micro-batches. It stays 0: a micro-batch that does not fit into memory ends the group."""
        return self._own.halvings

    @property
    def safe_tokens(self) -> int:
        """Maximum tokens of one pass of the base model on each member."""
        return self._own.safe_tokens

    @property
    def device_memory(self) -> tuple[int, int]:
        """Bytes in use and total bytes of the first member's device."""
        return self._own.device_memory


#: Engine of a worker: of this process, or of a group.
WorkerEngine: TypeAlias = Engine | GroupEngine


class GroupBank:
    """Stand-in of `AdapterBank` over all members, for use by the first member."""

    def __init__(self, own: Engine, followers: Followers) -> None:
        self._engine = own
        self._own = own.adapters
        self._followers = followers
        self.layout_of = own.adapters.layout_of

    def __contains__(self, run: object) -> bool:
        return run in self._own or self._member_of(run) > 0

    def drop(self, run: str) -> None:
        """Drop a run's adapter. Idempotent."""
        self._call(self._member_of(run), AdapterBank.drop, run)

    def state(self, run: str) -> AdapterState:
        """Return a run's adapter, copied to the host of the first member. Raises KeyError for an unknown run."""
        state: AdapterState = self._call(self._member_of(run), AdapterBank.state, run)
        return state

    def copy_out(self, run: str) -> StateCopy:
        """Start to copy a run's adapter to the host. A copy from another member is complete on return.

        Raises KeyError for an unknown run.
        """
        return arrived(self.state(run)) if self._member_of(run) else self._own.copy_out(run)

    def restore(self, run: str, state: AdapterState) -> None:
        """Replace the state of a run, on the member with the fewest bytes of adapters.

        Raises ValueError if the state does not fit the modules of this base model.
        """
        layout = self.layout_of(state.spec)
        if state.weights.shape != (layout.size,):
            raise ValueError(f"The state holds {state.weights.numel()} values, not {layout.size}.")
        self.drop(run)
        self._call(self._chosen_for(run, self._loads()), restore_only, run, state)

    def prefetch(self, runs: Sequence[str]) -> None:
        """Start to load this member's adapters of the next cycle. The other members load theirs in the cycle."""
        self._own.prefetch([run for run in runs if run in self._own])

    def runs_to_evict(self) -> list[str]:
        """Return the runs to evict so that each member keeps its host memory limit, member by member."""
        elsewhere = (run for facts in self._followers.facts for run in facts.runs_to_evict)
        return [*self._own.runs_to_evict(), *elsewhere]

    @property
    def offloaded(self) -> int:
        """Number of adapters that are entirely on the host. Any thread may read it."""
        return self._own.offloaded + sum(facts.offloaded for facts in self._followers.facts)

    @property
    def device_limit_bytes(self) -> int | None:
        """Maximum bytes of adapters on all devices; None: no limit."""
        limit = self._own.device_limit_bytes
        return None if limit is None else limit * (1 + len(self._followers.facts))

    @property
    def by_tier(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of adapters per tier. Any thread may read it."""
        by_member = [self._own.by_tier, *(facts.by_tier for facts in self._followers.facts)]
        return {
            tier: (sum(each[tier][0] for each in by_member), sum(each[tier][1] for each in by_member))
            for tier in by_member[0]
        }

    @property
    def members(self) -> list[MemberFacts]:
        """State of each member, as of its last answer."""
        return [facts_of(self._engine), *self._followers.facts]

    def shares(self, ops: Sequence[Op]) -> list[list[Op]]:
        """Return the ops of a cycle per member. The ops of a run go to the member with its adapter.

        New runs are assigned in the order of the ops, each to the member with the fewest bytes of adapters.
        """
        loads = self._loads()
        member_by_run: dict[str, int] = {}
        shares: list[list[Op]] = [[] for _ in loads]
        for op in ops:
            if op.run not in member_by_run:
                is_new = begins_run(op) and op.run not in self
                member_by_run[op.run] = self._chosen_for(op.run, loads) if is_new else self._member_of(op.run)
                if is_new:
                    loads[member_by_run[op.run]] += self._size_of(op)
            shares[member_by_run[op.run]].append(op)
        return shares

    def _size_of(self, op: Op) -> int:
        """Return the estimated bytes of the adapter that an op creates; 0 for an invalid spec."""
        if isinstance(op, Create):
            spec = op.spec
        elif isinstance(op, Import):
            spec = op.adapter.spec
        else:
            spec = op.weights.spec  # type: ignore[union-attr]  # a load
        return 16 * self.layout_of(spec).size if 0 < spec.rank <= self._engine.facts.max_rank else 0

    def _chosen_for(self, run: str, loads: Sequence[int]) -> int:
        member = lightest(loads)
        log.info("run_on_member", run=run, member=member)
        return member

    def _loads(self) -> list[int]:
        return [facts.adapter_bytes for facts in self.members]

    def _member_of(self, run: object) -> int:
        """Return the member with the adapter of a run; the first one for an unknown run."""
        others = enumerate(self._followers.facts, start=1)
        return next((number for number, facts in others if run in facts.runs), 0)

    def _call(self, member: int, method: Callable[..., Any], *args: object) -> Any:
        """Return the result of a function of the adapter bank of one member."""
        return self._followers.call(member, method, *args) if member else method(self._own, *args)


class GroupOpenPasses:
    """Open passes of all members."""

    def __init__(self, adapters: GroupBank) -> None:
        self._adapters = adapters

    def __contains__(self, op_id: object) -> bool:
        return any(op_id in facts.open_passes for facts in self._adapters.members)

    @property
    def runs(self) -> frozenset[str]:
        """Runs with an open pass."""
        return frozenset(run for facts in self._adapters.members for run, _ in facts.open_passes)


def arrived(state: AdapterState) -> StateCopy:
    """Return a state received from another member as a completed copy."""
    arenas = {"weights": (state.weights,), "grads": (state.grads,), "m": (state.m,), "v": (state.v,)}
    return StateCopy(state.spec, state.step, state.grads_pending, HostArenas(arenas, torch.cpu.Event()))


def lightest(loads: Sequence[int]) -> int:
    """Return the member with the fewest bytes of adapters; the first one on a tie. Pure.

    The same history selects the same member. No bit of a run's results depends on the choice: its forwards use
    the same weights on each member, and all of its sums are computed on that member.
    """
    return min(range(len(loads)), key=lambda member: loads[member])


def restore_only(adapters: AdapterBank, run: str, state: AdapterState) -> None:
    """Restore a run without a result: the adapter must not travel back."""
    adapters.restore(run, state)


def together(outputs: Sequence[CycleOutput]) -> CycleOutput:
    """Return the combined output of one cycle; the members ran concurrently, so times are maxima."""
    return CycleOutput(
        outputs={at: each for output in outputs for at, each in output.outputs.items()},
        forwards=max(output.forwards for output in outputs),
        tokens=sum(output.tokens for output in outputs),
        padded_tokens=sum(output.padded_tokens for output in outputs),
        wave_s=max(output.wave_s for output in outputs),
        optim_s=max(output.optim_s for output in outputs),
        is_exact=all(output.is_exact for output in outputs),
        divided={at: each for output in outputs for at, each in output.divided.items()},
        parts=outputs[0].parts,
    )
