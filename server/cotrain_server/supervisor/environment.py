"""Which `COTRAIN_*` variable belongs to which process, so that each gets its own and no typo passes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain_server.settings import ServerSettings
from cotrain_store.settings.store import PREFIX, StoreSettings, with_password

if TYPE_CHECKING:
    from collections.abc import Mapping

STORE = frozenset(name.upper() for name in StoreSettings.model_fields)
#: Of every process, for tests (`cotrain_store.failpoints`).
FAULTS = frozenset({"FAILPOINTS", "FAILPOINTS_LOG"})
API = frozenset(name.upper() for name in ServerSettings.model_fields)
#: By name, since no process may import another; a test compares them with the real settings.
SCHEDULER = STORE | {
    "CLOCK_MODE",
    "CLOCK_PERIOD_S",
    "GATHER_MS",
    "QUANTUM_TOKENS",
    "REASSIGN_AFTER_S",
    "GAP_LIMIT_S",
}
WORKER = STORE | {
    "BASE_MODEL",
    "WORKER_ID",
    "DEVICE",
    "DTYPE",
    "TORCH_THREADS",
    "MICRO_BATCH_TOKENS",
    "HOST_BYTES",
    "ADAPTER_BYTES",
    "RECOMPUTE",
    "LORA_BACKEND",
    "FUSION",
    "MAX_RANK",
    "OFFLINE",
    "SNAPSHOT_DEBT_S",
    "SNAPSHOT_DEBT_OPS",
    "SNAPSHOT_DEBT_BYTES",
    "SNAPSHOT_IDLE_S",
    "EVICT_IDLE_S",
    "ORPHAN_AGE_S",
    "RECORD_CYCLES",
    "STOP_GRACE_S",
    "SAMPLER",
    "SAMPLING_SHARE",
    "KV_CACHE_TOKENS",
    "OWED_MEMORY_BYTES",
    "WEIGHTS_MEMORY_BYTES",
    "VLLM_URL",
    "VLLM_API_KEY",
}
#: Read by clients, which may share a shell with a server.
CLIENT = frozenset({"API_KEY", "BASE_URL", "PROGRESS"})
_KNOWN = API | SCHEDULER | WORKER | CLIENT | FAULTS


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """List the `COTRAIN_*` variables that no process knows."""
    present = os.environ if environ is None else environ
    ours = (name for name in present if name.startswith(PREFIX))
    return sorted(name for name in ours if name.removeprefix(PREFIX) not in _KNOWN)


def opened(redis_url: str | None) -> str | None:
    """Complete a Redis' URL by the password of COTRAIN_REDIS_PASSWORD_FILE. Raises ValueError."""
    file = os.environ.get(f"{PREFIX}REDIS_PASSWORD_FILE")
    return with_password(redis_url, Path(file)) if redis_url and file else redis_url


def environment(
    names: frozenset[str], given: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Make a process's environment: ours, with only its own variables, `given` before inherited."""
    names |= FAULTS
    inherited = os.environ if environ is None else environ
    own = {f"{PREFIX}{name}": value for name, value in given.items() if name in names}
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(PREFIX) or name.removeprefix(PREFIX) in names
    }
    return {**kept, **own}
