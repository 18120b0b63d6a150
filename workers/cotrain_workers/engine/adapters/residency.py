"""Selection of the adapters on the device: those of the cycle first, then the most recently used. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

#: Share of adapters in the device memory next to the base model. Micro-batches take up to 0.54 of
#: it (`memory_model.py`), key-value memory 0.25 (`kv_cache.py`).
ADAPTER_SHARE = 0.2
GIB = 1 << 30


@dataclass(frozen=True)
class AdapterSize:
    """Size and location of an adapter."""

    run: str
    bytes: int  # on the device
    is_on_device: bool


@dataclass(frozen=True)
class Moves:
    """Copies to make, in order: first out, then in."""

    offload: Sequence[str]
    bring: Sequence[str]


def moves_for(sizes: Sequence[AdapterSize], needed: Collection[str], budget: int | None) -> Moves:
    """Bring in all adapters of a cycle, and offload the fewest others, the least recently used first.

    `sizes` are in order of use, the least used first. Needed adapters come in even if they do not fit.
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
    sizes: Sequence[AdapterSize], next_runs: Sequence[str], in_use: Collection[str], budget: int | None
) -> Moves:
    """Bring in the adapters of the next cycle, in its order, while they fit next to the adapters in use."""
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


def device_groups(runs: Sequence[str], bytes_by_run: Mapping[str, int], budget: int | None) -> list[list[str]]:
    """Split the runs of a cycle into the fewest groups, in order, that fit on the device one at a time.

    There is almost always one group. The budget only affects which runs compute together. An adapter larger than
    the budget is a group of its own.
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
    """Return the runs to evict to free enough host memory; `bytes_by_run` has the least used first."""
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
    """Return the default device bytes for adapters: a share of the rest, in whole GiB.

    It is based on all memory instead of the free memory, in whole GiB. The runs that compute
    together may depend on it, so it must be the same after a restart.
    """
    return max(GIB, int((device_bytes - taken_bytes) * ADAPTER_SHARE) // GIB * GIB)
