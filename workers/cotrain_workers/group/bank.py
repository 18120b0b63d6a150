"""Adapter bank of a group: each run's adapter is on one member."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.adapters.copies import AdapterState, StateCopy
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Import, Op, begins_run
from cotrain_workers.engine.spec import AdapterSpec, Layout
from cotrain_workers.group.followers import Followers, MemberFacts, facts_of


def lightest(loads: Sequence[int]) -> int:
    """Return the member with the fewest bytes of adapters; the first one on a tie. Pure.

    The same history selects the same member. No bit of a run's results depends on the choice: its forwards use
    the same weights on each member, and all of its sums are computed on that member.
    """
    return min(range(len(loads)), key=lambda member: loads[member])


def restore(adapters: AdapterBank, run: str, state: AdapterState) -> None:
    """Restore a run without a result: the adapter must not travel back."""
    adapters.restore(run, state)


log = structlog.get_logger()


@dataclass(frozen=True)
class Arrived:
    """State received from another member."""

    of_run: AdapterState

    def state(self) -> AdapterState:
        """Return the state."""
        return self.of_run


class GroupBank:
    """Stand-in of `AdapterBank` over all members, for use by the first member."""

    def __init__(self, own: Engine, followers: Followers) -> None:
        self._engine = own
        self._own = own.adapters
        self._followers = followers

    def __contains__(self, run: object) -> bool:
        return run in self._own or self._follower_of(run) is not None

    def drop(self, run: str) -> None:
        """Drop a run's adapter. Idempotent."""
        self._own.drop(run)
        follower = self._follower_of(run)
        if follower is not None:
            self._followers.call(follower, AdapterBank.drop, run)

    def state(self, run: str) -> AdapterState:
        """Return a run's adapter, copied to the host of the first member. Raises KeyError for an unknown run."""
        return self.copy_out(run).state()

    def copy_out(self, run: str) -> StateCopy | Arrived:
        """Start to copy a run's adapter to the host. A copy from another member is complete on return.

        Raises KeyError for an unknown run.
        """
        follower = self._follower_of(run)
        if follower is None:
            return self._own.copy_out(run)
        return Arrived(self._followers.call(follower, AdapterBank.state, run))

    def restore(self, run: str, state: AdapterState) -> None:
        """Replace the state of a run, on the member with the fewest bytes of adapters.

        Raises ValueError if the state does not fit the modules of this base model.
        """
        layout = self.layout_of(state.spec)
        if state.weights.shape != (layout.size,):
            raise ValueError(f"The state holds {state.weights.numel()} values, not {layout.size}.")
        self.drop(run)
        member = self._chosen_for(run, self._loads())
        if member == 0:
            self._own.restore(run, state)
        else:
            self._followers.call(member, restore, run, state)

    def prefetch(self, runs: Sequence[str]) -> None:
        """Start to load this member's adapters of the next cycle. The other members load theirs in the cycle."""
        self._own.prefetch([run for run in runs if run in self._own])

    def runs_to_evict(self) -> list[str]:
        """Return the runs to evict so that each member keeps its host memory limit, member by member."""
        elsewhere = (run for facts in self._followers.facts for run in facts.runs_to_evict)
        return [*self._own.runs_to_evict(), *elsewhere]

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return the layout of an adapter's matrices in its arenas."""
        return self._own.layout_of(spec)

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
        found = dict(self._own.by_tier)
        for facts in self._followers.facts:
            for tier, (count, size) in (facts.by_tier or {}).items():
                counted, total = found.get(tier, (0, 0))
                found[tier] = (counted + count, total + size)
        return found

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
                member_by_run[op.run] = self._chosen_for(op.run, loads) if is_new else self._follower_of(op.run) or 0
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

    def _follower_of(self, run: object) -> int | None:
        for number, facts in enumerate(self._followers.facts, start=1):
            if run in facts.runs:
                return number
        return None
