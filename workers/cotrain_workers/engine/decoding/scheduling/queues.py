"""The sequences of each tenant: those that wait, and those that run and so hold pages."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from cotrain_workers.engine.decoding.sequence import Group, SequenceState

AGE = attrgetter("age")
ARRIVAL = attrgetter("arrival")


@dataclass
class TenantQueue:
    """One tenant's sequences."""

    groups: list[Group] = field(default_factory=list)
    """With sequences that wait, the oldest first."""
    running: list[SequenceState] = field(default_factory=list)
    """The oldest first."""
    weight: float = 1.0
    """Of its newest request's tenant."""

    @property
    def is_empty(self) -> bool:
        """Return whether nothing of this tenant is left."""
        return not (self.groups or self.running)

    def wait(self, group: Group) -> None:
        """Let a request's sequences wait."""
        if group not in self.groups:
            insort(self.groups, group, key=ARRIVAL)

    def first(self) -> SequenceState | None:
        """Return the oldest that may be admitted; the first of a request computes its prompt for the others."""
        for group in self.groups:
            sequence = group.next()
            if sequence is not None:
                return sequence
        return None

    def admit(self, sequence: SequenceState) -> None:
        """Let the sequence run that was `first`."""
        group = sequence.group
        group.begin(sequence)
        if not group.has_waiting:
            self.groups.remove(group)
        insort(self.running, sequence, key=AGE)

    def preempt(self, sequence: SequenceState) -> None:
        """Let a running sequence wait again."""
        self.running.remove(sequence)
        sequence.group.wait_again(sequence)
        self.wait(sequence.group)

    def cancel(self, group: Group) -> list[SequenceState]:
        """Take a request out; return those of its sequences that were running."""
        if group in self.groups:
            self.groups.remove(group)
        ran = [sequence for sequence in self.running if sequence.group is group]
        self.running = [sequence for sequence in self.running if sequence.group is not group]
        return ran
