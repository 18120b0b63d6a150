"""Queues of sequences of each tenant: waiting, and running with pages."""

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from cotrain_workers.engine.decoding.sequence import Group, SequenceState

AGE = attrgetter("age")
ARRIVAL = attrgetter("arrival")


@dataclass
class TenantQueue:
    """Sequences of one tenant."""

    groups: list[Group] = field(default_factory=list)
    """Requests with waiting sequences, oldest first."""
    running: list[SequenceState] = field(default_factory=list)  # running sequences, oldest first
    weight: float = 1.0  # weight given by the tenant's newest request

    @property
    def is_empty(self) -> bool:
        """True if the tenant has no sequence."""
        return not (self.groups or self.running)

    def wait(self, group: Group) -> None:
        """Enqueue the waiting sequences of a request."""
        if group not in self.groups:
            insort(self.groups, group, key=ARRIVAL)

    def first(self) -> SequenceState | None:
        """Return the oldest sequence that may be admitted.

        The first sequence of a request computes the prompt; its other sequences are admitted after that.
        """
        for group in self.groups:
            sequence = group.next()
            if sequence is not None:
                return sequence
        return None

    def admit(self, sequence: SequenceState) -> None:
        """Move the sequence returned by `first` to the running ones."""
        group = sequence.group
        group.begin(sequence)
        if not group.has_waiting:
            self.groups.remove(group)
        insort(self.running, sequence, key=AGE)

    def preempt(self, sequence: SequenceState) -> None:
        """Move a running sequence back to the waiting ones."""
        self.running.remove(sequence)
        sequence.group.wait_again(sequence)
        self.wait(sequence.group)

    def cancel(self, group: Group) -> list[SequenceState]:
        """Remove a request; return its sequences that were running."""
        if group in self.groups:
            self.groups.remove(group)
        ran = [sequence for sequence in self.running if sequence.group is group]
        self.running = [sequence for sequence in self.running if sequence.group is not group]
        return ran
