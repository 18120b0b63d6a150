"""Passes that take several cycles: what they have found so far is kept here between two of them.

Nothing of it is part of a run's state: an adapter that is dropped or restored takes its open pass along,
which then begins anew, to the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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

    def take(self, first_by_run: Mapping[str, int]) -> dict[tuple[str, int], PassState]:
        """Take out the passes that come next in their runs, by (run, seq), and forget others of these runs."""
        taken = {}
        for run, seq in first_by_run.items():
            state = self._state_by_run.get(run)
            if state is not None and state.op.seq == seq:
                taken[run, seq] = self._state_by_run.pop(run)
            else:
                self.drop(run)
        return taken

    def keep(self, state: PassState) -> None:
        """Keep a pass of which slices are left; its gradient stays with its adapter, wherever that goes."""
        state.gradient = None
        self._state_by_run[state.op.run] = state
