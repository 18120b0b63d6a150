"""Model of the log of a run: a dict of ops, two cursors and a set of results."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotrain_store.messages.ids import OpId, WorkerId
from cotrain_store.messages.ops import PASSES, OpKind, Result, Step

#: More ops than a run has in one step of these tests.
MANY = 9


@dataclass
class RunModel:
    """Expected log of one run."""

    accepted: dict[int, tuple[str, OpKind, int]] = field(default_factory=dict)
    next: int = 0
    done: int = -1
    snap: int = -1
    cut: int = -1
    older_file: str = ""
    worker: WorkerId | None = None
    closed: bool = False
    dead: set[int] = field(default_factory=set)
    """Accepted ops that were failed because the run was closed."""
    rejected: set[int] = field(default_factory=set)
    """Accepted ops that were failed for a rollback or behind a gap: they keep their place."""
    given_up: set[int] = field(default_factory=set)
    """Those behind a gap, while it is there."""
    begun: tuple[int, str] = (0, "")
    """Tokens that ran of the op after `done`, and the process that has it open."""
    rollbacks: int = 0
    unread: dict[int, int] = field(default_factory=dict)
    """Bytes of results that are committed and not sent."""

    def put_back(self, seq: int, tokens: int, process: str) -> None:
        """Return the planned ops from `seq` on to the queue, or fail them if the run is closed."""
        if self.closed:
            self.dead |= {s for s in self.accepted if seq <= s < self.next}
        else:
            self.begun = (tokens, process)
            self.given_up = set()
        self.next = seq


def halves(step: Step, finished: int) -> tuple[dict[OpId, Result], dict[OpId, int]]:
    """Return results of `finished` ops of each run and of those before its next pass, which stays open."""
    results: dict[OpId, Result] = {}
    opened: dict[OpId, int] = {}
    for run in {op.run for op in step.ops}:
        for number, op in enumerate(op for op in step.ops if op.run == run):
            if number >= finished and op.kind in PASSES:
                opened[run, op.seq] = 3 + number
                break
            results[run, op.seq] = Result.of_json({"seq": op.seq})
    return results, opened
