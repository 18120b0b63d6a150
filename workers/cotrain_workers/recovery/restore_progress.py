"""The progress of a restore: counted by the worker's loop, read by its heartbeat."""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_store.messages.ids import RunId


class RestoreProgress:
    """The runs that are restored now, and the ops of their logs. Any thread may read it."""

    def __init__(self) -> None:
        self._ops: dict[RunId, int] = {}
        self._done: dict[RunId, int] = {}
        self._runs_done = 0

    def begin(self, ops_by_run: Mapping[RunId, int]) -> None:
        """Expect these runs, each with the number of ops behind its newest copy."""
        self._ops, self._done, self._runs_done = dict(ops_by_run), {}, 0

    def expect(self, run: RunId, ops: int) -> None:
        """Correct the ops of one run: an older copy has more behind it."""
        if run in self._ops:
            self._ops = self._ops | {run: ops}

    def reach(self, run: RunId, ops: int) -> None:
        """Note the number of ops of a run that are done."""
        if run in self._ops:
            self._done = self._done | {run: min(ops, self._ops[run])}

    def finish(self, run: RunId) -> None:
        """Note that a run is restored, or cannot be."""
        if run in self._ops:
            self.reach(run, self._ops[run])
            self._runs_done += 1

    def end(self) -> None:
        """Note that the restore is over."""
        self._ops, self._done, self._runs_done = {}, {}, 0

    @property
    def now(self) -> dict[str, int] | None:
        """Return the value of `WorkerHeartbeat.restoring`: None while nothing is restored."""
        ops, done, runs_done = self._ops, self._done, self._runs_done
        if not ops:
            return None
        return {
            "runs_done": runs_done,
            "runs": len(ops),
            "ops_done": sum(done.values()),
            "ops": sum(ops.values()),
        }
