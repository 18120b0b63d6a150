"""Decide which adapters are on the device: those a cycle needs, and of the others the last used. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

#: Of the device memory that the base model leaves, what adapters may take. Micro-batches take up to 0.54
#: of it (`activation_memory.py`), key-value memory 0.25 (`kv_cache.py`).
ADAPTER_SHARE = 0.2
GIB = 1 << 30


@dataclass(frozen=True)
class Seat:
    """An adapter as the decision sees it."""

    run: str
    bytes: int  # on the device
    is_on_device: bool


@dataclass(frozen=True)
class Moves:
    """What to copy, in order: first out, then in."""

    park: Sequence[str]
    bring: Sequence[str]


def moves_for(seats: Sequence[Seat], needed: Collection[str], budget: int | None) -> Moves:
    """Bring in all that a cycle needs, and park as few others as must be, the least used first.

    `seats` are in order of use, the least used first. What is needed comes in even if it does not fit.
    """
    bring = [seat for seat in seats if seat.run in needed and not seat.is_on_device]
    if budget is None:
        return Moves([], [seat.run for seat in bring])
    over = on_device(seats) + sum(seat.bytes for seat in bring) - budget
    park = []
    for seat in seats:
        if over <= 0:
            break
        if seat.is_on_device and seat.run not in needed:
            park.append(seat.run)
            over -= seat.bytes
    return Moves(park, [seat.run for seat in bring])


def moves_ahead(
    seats: Sequence[Seat], next_runs: Sequence[str], in_use: Collection[str], budget: int | None
) -> Moves:
    """Bring in what the next cycle needs as far as it fits beside what this one uses, in its order."""
    seat_by_run = {seat.run: seat for seat in seats}
    needed = set(in_use)
    taken = sum(seat.bytes for seat in seats if seat.run in needed)
    for run in next_runs:
        seat = seat_by_run.get(run)
        if seat is None or run in needed:
            continue
        if budget is not None and taken + seat.bytes > budget:
            break
        needed.add(run)
        taken += seat.bytes
    ahead = moves_for(seats, needed, budget)
    return ahead if ahead.bring else Moves([], [])


def on_device(seats: Sequence[Seat]) -> int:
    """Return the bytes of the adapters on the device."""
    return sum(seat.bytes for seat in seats if seat.is_on_device)


def shifts_of(
    runs: Sequence[str], bytes_by_run: Mapping[str, int], budget: int | None
) -> list[list[str]]:
    """Cut the runs of a cycle into as few groups, in their order, as fit on the device one at a time.

    Almost always one. What depends on the budget here is who computes together, and nothing else.
    An adapter larger than the budget is a group by itself.
    """
    shifts: list[list[str]] = [[]]
    left = budget
    for run in runs:
        size = bytes_by_run.get(run, 0)
        if left is not None and size > left and shifts[-1]:
            shifts.append([])
            left = budget
        shifts[-1].append(run)
        left = None if left is None else left - size
    return shifts


def over_budget(bytes_by_run: Mapping[str, int], budget: int | None) -> list[str]:
    """Return the runs whose leaving frees enough host memory; `bytes_by_run` has the least used first."""
    if budget is None:
        return []
    over, leaving = sum(bytes_by_run.values()) - budget, []
    for run, size in bytes_by_run.items():
        if over <= 0:
            break
        leaving.append(run)
        over -= size
    return leaving


def adapter_budget(device_bytes: int, taken_bytes: int) -> int:
    """Return the device bytes for adapters when nobody said: a share of the rest, in whole GiB.

    Whole GiB, and of all memory instead of the free: who computes together may depend on it, so that it
    must be the same after a restart.
    """
    return max(GIB, int((device_bytes - taken_bytes) * ADAPTER_SHARE) // GIB * GIB)
