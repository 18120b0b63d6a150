"""Which GPU each worker computes on: one of its own, as far as there are as many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Of the NVIDIA driver: a folder per GPU of this host.
DRIVER = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus(environ: Mapping[str, str] | None = None, driver: Path = DRIVER) -> list[str]:
    """Name the GPUs that processes started by this one may use, as CUDA_VISIBLE_DEVICES does."""
    listed = (os.environ if environ is None else environ).get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(at) for at, _ in enumerate(driver.iterdir())] if driver.is_dir() else []


def variables_of(worker: int, names: list[str]) -> dict[str, str]:
    """Return what a worker's environment needs so that it sees one GPU; nothing if there is no choice."""
    return {VISIBLE: names[worker % len(names)]} if len(names) > 1 else {}


def shared(workers: int, names: list[str]) -> str | None:
    """Say that workers have to share a GPU, each of which plans with all of its memory; None if not."""
    if not names or workers <= len(names):
        return None
    return (
        f"{workers} base models and {len(names)} GPU{'s' if len(names) > 1 else ''}: workers that share one "
        "plan with all of its memory each. Set COTRAIN_MICRO_BATCH_TOKENS, COTRAIN_ADAPTER_BYTES and "
        "COTRAIN_KV_CACHE_TOKENS, or serve fewer models."
    )
