"""Decide which adapters are on the device: those a cycle needs, and of the others the last used. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

#: Of the device memory that the base model leaves, what adapters may take. Micro-batches take up to 0.54
#: of it (`memory_model.py`), key-value memory 0.25 (`kv_cache.py`).
ADAPTER_SHARE = 0.2
GIB = 1 << 30


@dataclass(frozen=True)
class AdapterSize:
    """An adapter as the decision sees it."""

    run: str
    bytes: int  # on the device
    is_on_device: bool


@dataclass(frozen=True)
class Moves:
    """What to copy, in order: first out, then in."""

    offload: Sequence[str]
    bring: Sequence[str]


def moves_for(sizes: Sequence[AdapterSize], needed: Collection[str], budget: int | None) -> Moves:
    """Bring in all that a cycle needs, and offload as few others as must be, the least used first.

    `sizes` are in order of use, the least used first. What is needed comes in even if it does not fit.
    """
    bring = [adapter for adapter in sizes if adapter.run in needed and not adapter.is_on_device]
    if budget is None:
        return Moves([], [adapter.run for adapter in bring])
    over = on_device(sizes) + sum(adapter.bytes for adapter in bring) - budget
    offload = []
    for adapter in sizes:
        if over <= 0:
            break
        if adapter.is_on_device and adapter.run not in needed:
            offload.append(adapter.run)
            over -= adapter.bytes
    return Moves(offload, [adapter.run for adapter in bring])


def prefetch_moves(
    sizes: Sequence[AdapterSize],
    next_runs: Sequence[str],
    in_use: Collection[str],
    budget: int | None,
) -> Moves:
    """Bring in what the next cycle needs as far as it fits with what this one uses, in its order."""
    adapter_by_run = {adapter.run: adapter for adapter in sizes}
    needed = set(in_use)
    taken = sum(adapter.bytes for adapter in sizes if adapter.run in needed)
    for run in next_runs:
        adapter = adapter_by_run.get(run)
        if adapter is None or run in needed:
            continue
        if budget is not None and taken + adapter.bytes > budget:
            break
        needed.add(run)
        taken += adapter.bytes
    moves = moves_for(sizes, needed, budget)
    return moves if moves.bring else Moves([], [])


def on_device(sizes: Sequence[AdapterSize]) -> int:
    """Return the bytes of the adapters on the device."""
    return sum(adapter.bytes for adapter in sizes if adapter.is_on_device)


def device_groups(
    runs: Sequence[str], bytes_by_run: Mapping[str, int], budget: int | None
) -> list[list[str]]:
    """Cut the runs of a cycle into as few groups, in their order, as fit on the device one at a time.

    Almost always one. What depends on the budget here is who computes together, and nothing else.
    An adapter larger than the budget is a group of its own.
    """
    groups: list[list[str]] = [[]]
    left = budget
    for run in runs:
        size = bytes_by_run.get(run, 0)
        if left is not None and size > left and groups[-1]:
            groups.append([])
            left = budget
        groups[-1].append(run)
        left = None if left is None else left - size
    return groups


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
    """Return the device bytes for adapters by default: a share of the rest, in whole GiB.

    Whole GiB, and of all memory instead of the free: who computes together may depend on it, so that it
    must be the same after a restart.
    """
    return max(GIB, int((device_bytes - taken_bytes) * ADAPTER_SHARE) // GIB * GIB)
