"""Passes that take several cycles: what they have found so far is kept here between two of them.

Nothing of it is part of a run's state: an adapter that is dropped or restored takes its open pass along,
which then begins anew, to the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cotrain_workers.engine.adapters.adapter import Adapter
    from cotrain_workers.engine.ops import Pass, ReverseKl
    from cotrain_workers.engine.training.pass_state import PassState


class OpenPasses:
    """The open pass of each run that has one."""

    def __init__(self) -> None:
        self._state_by_run: dict[str, PassState] = {}

    def __contains__(self, op_id: object) -> bool:
        return op_id in self.ids

    @property
    def ids(self) -> frozenset[tuple[str, int]]:
        """Return them, by (run, seq)."""
        return frozenset((run, state.op.seq) for run, state in list(self._state_by_run.items()))

    @property
    def runs(self) -> Collection[str]:
        """Return the runs that have one."""
        return self._state_by_run.keys()

    def drop(self, run: str) -> None:
        """Forget what a run has open; twice is harmless."""
        state = self._state_by_run.pop(run, None)
        if state is not None:
            state.adapter.drop_open_gradient()

    def drop_others(self, run: str, seq: int) -> None:
        """Forget what a run has open unless it is its op `seq`, which comes next."""
        if run in self._state_by_run and self._state_by_run[run].op.seq != seq:
            self.drop(run)

    def keep(self, state: PassState) -> None:
        """Keep a pass of which slices are left; its gradient stays with its adapter, wherever that goes."""
        state.gradient = None
        self._state_by_run[state.op.run] = state

    def resume(
        self, op: Pass | ReverseKl, adapter: Adapter, allowance: int | None
    ) -> PassState | None:
        """Take out a pass that goes on in this cycle; None for one that is not open."""
        if (op.run, op.seq) not in self:
            return None
        state = self._state_by_run.pop(op.run)
        if state.adapter is not adapter:
            return None
        state.resume(allowance)
        return state


def next_wave(
    passes: Sequence[Pass | ReverseKl], allowances: Mapping[tuple[str, int], int]
) -> tuple[list[Pass | ReverseKl], list[Pass | ReverseKl]]:
    """Split passes, those of a run in its order, into what may run now and what waits.

    Behind a pass that may stay open its run waits: until it has ended, or for the next cycle.
    """
    wave: list[Pass | ReverseKl] = []
    later: list[Pass | ReverseKl] = []
    waiting: set[str] = set()
    for op in passes:
        (later if op.run in waiting else wave).append(op)
        if (op.run, op.seq) in allowances:
            waiting.add(op.run)
    return wave, later
