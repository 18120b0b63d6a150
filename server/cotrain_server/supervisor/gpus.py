"""Which GPU each worker computes on: one of its own, as far as there are as many."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Of the NVIDIA driver: a folder per GPU of this host.
DRIVER = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Else CUDA counts the fastest GPU as 0, and `nvidia-smi` the first on the bus.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
SHARING = (
    "workers that share one plan with all of its memory each. Set COTRAIN_MICRO_BATCH_TOKENS, "
    "COTRAIN_ADAPTER_BYTES and COTRAIN_KV_CACHE_TOKENS, or serve fewer models."
)


class UnfitGpus(Exception):
    """What `--gpus` asks for cannot be had."""


def gpus(environ: Mapping[str, str] | None = None, driver: Path = DRIVER) -> list[str]:
    """Name the GPUs that processes started by this one may use, as CUDA_VISIBLE_DEVICES does."""
    listed = (os.environ if environ is None else environ).get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(at) for at, _ in enumerate(driver.iterdir())] if driver.is_dir() else []


def chosen(
    asked: str, base_models: int, there: Sequence[str], group_size: int = 1
) -> tuple[str, ...]:
    """Read `all`, or names of GPUs separated by commas: there is a worker on each, or on `group_size` of them. Pure.

    Raises:
        UnfitGpus: there is none, none of that name, one is named twice, a group would lack some, or a base model
            would have none.
    """
    if not there:
        raise UnfitGpus(f"--gpus {asked}: no GPU can be seen here ({DRIVER}, {VISIBLE}).")
    asked_for = [word.strip() for word in asked.split(",") if word.strip()]
    names = tuple(there) if asked_for == ["all"] else tuple(asked_for)
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        named = ", ".join(unknown) or f"named {asked!r}"
        raise UnfitGpus(f"--gpus: there is no GPU {named}. There are {', '.join(there)}, or `all`.")
    if len(set(names)) < len(names):
        raise UnfitGpus(f"--gpus {asked}: name each GPU once; there is one worker on each.")
    if len(names) % group_size:
        raise UnfitGpus(
            f"--gpus {asked}: {_count(names)} and groups of {group_size}; each process of a group needs one of its own. "
            f"Name a multiple of {group_size}."
        )
    if len(names) < base_models * group_size:
        raise UnfitGpus(
            f"--gpus {asked}: {base_models} base models and {_count(names)}; each needs {_own(group_size)}. "
            "Serve fewer, or leave --gpus out and have them share."
        )
    return names


def enough(base_models: int, there: Sequence[str], group_size: int) -> None:
    """Raise UnfitGpus where there are GPUs, and not one for each process of each base model's group. Pure."""
    if group_size > 1 and 0 < len(there) < base_models * group_size:
        raise UnfitGpus(
            f"--group-size {group_size}: each process of a group needs a GPU of its own, and this host has "
            f"{len(there)}."
        )


def variables_of(worker: int, names: Sequence[str], group_size: int = 1) -> dict[str, str]:
    """Return what a worker's environment needs so that it sees its GPUs; nothing where there is none."""
    if not names:
        return {}
    first = worker * group_size
    own = [names[at % len(names)] for at in range(first, first + group_size)]
    return {VISIBLE: ",".join(own), **({} if VISIBLE in os.environ else ORDER)}


def notice(workers: int, names: Sequence[str], group_size: int = 1) -> str | None:
    """Say that workers have to share a GPU, or that GPUs are left over; None if neither."""
    taken = workers * group_size
    if not names or taken == len(names):
        return None
    if taken < len(names):
        return f"{taken} of {_count(names)} in use: --gpus all has a worker on each"
    return f"{workers} base models and {_count(names)}: {SHARING}"


def _own(group_size: int) -> str:
    return "one of its own" if group_size == 1 else f"{group_size} of its own"


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} GPU{'s' if len(names) > 1 else ''}"
