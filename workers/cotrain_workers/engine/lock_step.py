"""Coordination of passes over a base model that several processes hold, a part each.

To run a layer, all of them gather its weights at once. Each process therefore runs as many passes
of the base model as the others, of the same kinds in the same order.
"""

from enum import IntEnum
from typing import Protocol


class Forward(IntEnum):
    """Kind of a pass of the base model. Of several requested kinds the greatest runs first."""

    NONE = 0
    PLAIN = 1  # without gradients
    BACKWARD = 2
    RECOMPUTED = 3  # backward, with decoder layers recomputed

    @property
    def goes_back(self) -> bool:
        """True if the pass has a backward."""
        return self >= Forward.BACKWARD


class LockStep(Protocol):
    """Agreement with the other processes, if any, on the next pass of the base model."""

    @property
    def sharding(self) -> str:
        """Description of the processes that hold the base model: "" for this process alone. No bit depends on it."""

    def await_pass(self, wanted: Forward) -> Forward:
        """Wait until a pass of this kind can run, and return the kind to run it as.

        The two differ in one case: a pass that would keep its layers' values may have to recompute them.
        """


class Alone:
    """Lock step of a process that holds all of its base model."""

    sharding = ""

    def await_pass(self, wanted: Forward) -> Forward:
        """Return at once."""
        return wanted
