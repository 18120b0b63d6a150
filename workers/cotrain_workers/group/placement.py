"""Decide which member of a group a run lives on. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def lightest(loads: Sequence[int]) -> int:
    """Return the member that has the least bytes of adapters, of equal ones the first.

    The same history gives the same member. No bit of the run depends on it: its forwards see the same weights
    on each, and what is summed for it is summed there.
    """
    return min(range(len(loads)), key=lambda member: loads[member])
