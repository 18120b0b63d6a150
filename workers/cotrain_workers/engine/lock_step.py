"""Whose turn it is on a base model that several processes hold together, a part each.

To run a layer all of them gather its weights, at once: so each of them runs as many passes of the base model
as the others, of the same kinds in the same order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class Forward(IntEnum):
    """What a pass of the base model does; of several that are wanted the greatest goes first."""

    NONE = 0
    PLAIN = 1  # nothing of the base model is differentiated
    BACKWARD = 2
    RECOMPUTED = 3  # backward, and decoder layers are computed a second time there

    @property
    def goes_back(self) -> bool:
        """Return whether there is a backward."""
        return self >= Forward.BACKWARD


class LockStep(Protocol):
    """Agrees with the other processes, if there are any, on the next pass of the base model."""

    @property
    def sharding(self) -> str:
        """Say who holds the base model: "" for this process alone. No bit depends on it."""

    def await_pass(self, wanted: Forward) -> Forward:
        """Wait until a pass of this kind can run, and return the kind to run it as.

        That differs in one way: what was to keep its layers' values may have to compute them twice.
        """


class Alone:
    """This process holds all of its base model."""

    sharding = ""

    def await_pass(self, wanted: Forward) -> Forward:
        """Run it now."""
        return wanted
