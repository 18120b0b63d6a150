"""Which GPU each worker computes on: one of its own, as far as there are as many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def chosen(asked: str, base_models: int, there: Sequence[str]) -> tuple[str, ...]:
    """Read `all`, or names of GPUs separated by commas: there is a worker on each. Pure.

    Raises:
        UnfitGpus: there is none, none of that name, one is named twice, or a base model would have none.
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
    if len(names) < base_models:
        raise UnfitGpus(
            f"--gpus {asked}: {base_models} base models and {_count(names)}; each needs one of its own. "
            "Serve fewer, or leave --gpus out and have them share."
        )
    return names


def variables_of(worker: int, names: Sequence[str]) -> dict[str, str]:
    """Return what a worker's environment needs so that it sees one GPU; nothing where there is none."""
    if not names:
        return {}
    return {VISIBLE: names[worker % len(names)], **({} if VISIBLE in os.environ else ORDER)}


def notice(workers: int, names: Sequence[str]) -> str | None:
    """Say that workers have to share a GPU, or that GPUs are left over; None if neither."""
    if not names or workers == len(names):
        return None
    if workers < len(names):
        return f"{workers} of {_count(names)} in use: --gpus all has a worker on each"
    return f"{workers} base models and {_count(names)}: {SHARING}"


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} GPU{'s' if len(names) > 1 else ''}"
