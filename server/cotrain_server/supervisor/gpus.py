"""Assignment of GPUs to workers: one each, if there are enough."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Folder of the NVIDIA driver with one entry per GPU of this host.
DRIVER = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Otherwise CUDA counts the fastest GPU as 0, and `nvidia-smi` the first on the bus.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
SHARING = (
    "workers that share one plan with all of its memory each. Set COTRAIN_MICRO_BATCH_TOKENS, "
    "COTRAIN_ADAPTER_BYTES and COTRAIN_KV_CACHE_TOKENS, or serve fewer models."
)


class UnfitGpus(Exception):
    """Invalid value of `--gpus`."""


def gpus(environ: Mapping[str, str] | None = None, driver: Path = DRIVER) -> list[str]:
    """Return the GPUs visible to child processes, by their names in CUDA_VISIBLE_DEVICES."""
    listed = (os.environ if environ is None else environ).get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(at) for at, _ in enumerate(driver.iterdir())] if driver.is_dir() else []


def chosen(asked: str, base_models: int, there: Sequence[str], group_size: int = 1) -> tuple[str, ...]:
    """Parse `all`, or GPU names separated by commas: one worker on each, or on each `group_size` of
    them. Pure. Raises UnfitGpus: no GPU, an unknown or repeated name, an incomplete group, or a base model without a GPU.
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
    """Raise UnfitGpus if there are GPUs, but fewer than processes of all groups. Pure."""
    if group_size > 1 and 0 < len(there) < base_models * group_size:
        raise UnfitGpus(
            f"--group-size {group_size}: each process of a group needs a GPU of its own, and this host has "
            f"{len(there)}."
        )


def variables_of(worker: int, names: Sequence[str], group_size: int = 1) -> dict[str, str]:
    """Return the environment variables that select a worker's GPUs; empty without GPUs."""
    if not names:
        return {}
    first = worker * group_size
    own = [names[at % len(names)] for at in range(first, first + group_size)]
    return {VISIBLE: ",".join(own), **({} if VISIBLE in os.environ else ORDER)}


def notice(workers: int, names: Sequence[str], group_size: int = 1) -> str | None:
    """Return a message if workers share a GPU or GPUs are unused, else None."""
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
