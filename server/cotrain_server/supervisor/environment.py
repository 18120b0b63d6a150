"""Environment variables of each process: its own settings, and the GPUs of a worker.

Each process receives only its own `COTRAIN_*` variables, and an unknown variable is refused as a typo. Each worker has
a GPU of its own, if there are enough.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotrain_server.settings import ServerSettings
from cotrain_store.redis_client.address import parse_address
from cotrain_store.settings import PREFIX, SchedulerSettings, StoreSettings, WorkerSettings, with_password_of


def _names_of(settings: type[StoreSettings]) -> frozenset[str]:
    return frozenset(name.upper() for name in settings.model_fields)


#: Variables of every process, for tests (`cotrain_store.failpoints`).
FAULTS = frozenset({"FAILPOINTS", "FAILPOINTS_LOG"})
API = _names_of(ServerSettings)
SCHEDULER = _names_of(SchedulerSettings)
WORKER = _names_of(WorkerSettings)
#: Read by clients, which may share a shell with a server.
CLIENT = frozenset({"API_KEY", "BASE_URL", "PROGRESS"})
#: Variables of `cotrain serve` only.
SERVE = frozenset({"WORKERS", "GPUS"})
_KNOWN = API | SCHEDULER | WORKER | CLIENT | FAULTS | SERVE


#: Folder of the NVIDIA driver with one entry per GPU of this host.
DRIVER = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Otherwise CUDA counts the fastest GPU as 0, and `nvidia-smi` the first on the bus.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
SHARING = (
    "workers that share one plan with all of its memory each. Set COTRAIN_MICRO_BATCH_TOKENS, "
    "COTRAIN_ADAPTER_BYTES and COTRAIN_KV_CACHE_TOKENS, or serve fewer models."
)


def refused_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return an error sentence if there are unknown `COTRAIN_*` variables."""
    names = {name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX)}
    unknown = sorted(PREFIX + name for name in names - _KNOWN)
    return [f"Unknown settings: {', '.join(unknown)}."] if unknown else []


def with_password(redis_url: str | None) -> str | None:
    """Validate a Redis URL, and add the password of COTRAIN_REDIS_PASSWORD_FILE. Raises ValueError."""
    if not redis_url:
        return redis_url
    parse_address(redis_url)
    file = os.environ.get(f"{PREFIX}REDIS_PASSWORD_FILE")
    return with_password_of(redis_url, Path(file)) if file else redis_url


def environment(
    names: frozenset[str], given: Mapping[str, str], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return a process's environment: the inherited one, with only its own variables. `given` overrides its values."""
    names |= FAULTS
    own = {f"{PREFIX}{name}": value for name, value in given.items() if name in names}
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(PREFIX) or name.removeprefix(PREFIX) in names
    }
    return {**kept, **own}


class UnfitGpus(Exception):
    """Invalid value of `--gpus`."""


def visible_gpus(environ: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> list[str]:
    """Return the GPUs visible to child processes, by their names in CUDA_VISIBLE_DEVICES."""
    listed = environ.get(VISIBLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(at) for at, _ in enumerate(driver.iterdir())] if driver.is_dir() else []


def parse_gpus(option: str, base_models: int, visible: Sequence[str], group_size: int = 1) -> tuple[str, ...]:
    """Parse `all`, or GPU names separated by commas: one worker on each, or on each `group_size` of
    them. Pure. Raises UnfitGpus: no GPU, an unknown or repeated name, an incomplete group, or a base model without a GPU.
    """
    if not visible:
        raise UnfitGpus(f"--gpus {option}: no GPU can be seen here ({DRIVER}, {VISIBLE}).")
    words = [word.strip() for word in option.split(",") if word.strip()]
    names = tuple(visible) if words == ["all"] else tuple(words)
    unknown = [name for name in names if name not in visible]
    if unknown or not names:
        named = ", ".join(unknown) or f"named {option!r}"
        raise UnfitGpus(f"--gpus: there is no GPU {named}. There are {', '.join(visible)}, or `all`.")
    if len(set(names)) < len(names):
        raise UnfitGpus(f"--gpus {option}: name each GPU once; there is one worker on each.")
    if len(names) % group_size:
        raise UnfitGpus(
            f"--gpus {option}: {_count(names)} and groups of {group_size}; each process of a group needs one of its own. "
            f"Name a multiple of {group_size}."
        )
    if len(names) < base_models * group_size:
        raise UnfitGpus(
            f"--gpus {option}: {base_models} base models and {_count(names)}; each needs {_own(group_size)}. "
            "Serve fewer, or leave --gpus out and have them share."
        )
    return names


def check_group_gpus(base_models: int, visible: Sequence[str], group_size: int) -> None:
    """Raise UnfitGpus if there are GPUs, but fewer than processes of all groups. Pure."""
    if group_size > 1 and 0 < len(visible) < base_models * group_size:
        raise UnfitGpus(
            f"--group-size {group_size}: each process of a group needs a GPU of its own, and this host has "
            f"{len(visible)}."
        )


def gpu_variables(worker: int, names: Sequence[str], group_size: int = 1) -> dict[str, str]:
    """Return the environment variables that select a worker's GPUs; empty without GPUs."""
    if not names:
        return {}
    first = worker * group_size
    own = [names[at % len(names)] for at in range(first, first + group_size)]
    return {VISIBLE: ",".join(own), **({} if VISIBLE in os.environ else ORDER)}


def gpu_notice(workers: int, names: Sequence[str], group_size: int = 1) -> str | None:
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
