"""Progress of a restore: counted by the worker's loop, read by its heartbeat."""

from collections.abc import Mapping

from cotrain_store.messages.ids import RunId


class RestoreProgress:
    """Runs being restored, and the ops of their logs. Any thread may read it."""

    def __init__(self) -> None:
        self._ops: dict[RunId, int] = {}
        self._done: dict[RunId, int] = {}
        self._runs_done = 0

    def begin(self, ops_by_run: Mapping[RunId, int]) -> None:
        """Start the progress of these runs, each with the number of ops after its newest copy."""
        self._ops, self._done, self._runs_done = dict(ops_by_run), {}, 0

    def expect(self, run: RunId, ops: int) -> None:
        """Correct the number of ops of one run: more ops follow an older copy."""
        if run in self._ops:
            self._ops = self._ops | {run: ops}

    def reach(self, run: RunId, ops: int) -> None:
        """Record the number of finished ops of a run."""
        if run in self._ops:
            self._done = self._done | {run: min(ops, self._ops[run])}

    def finish(self, run: RunId) -> None:
        """Count a run as finished, whether it was restored or not."""
        if run in self._ops:
            self.reach(run, self._ops[run])
            self._runs_done += 1

    def end(self) -> None:
        """Clear the progress after the restore."""
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
