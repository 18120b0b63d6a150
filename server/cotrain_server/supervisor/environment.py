"""Which `COTRAIN_*` variable belongs to which process, so that each gets its own and no typo passes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cotrain_server.settings import ServerSettings
from cotrain_store.redis_client.address import parse_address
from cotrain_store.settings.removed import REPLACED_BY, removed_variables
from cotrain_store.settings.scheduler import SchedulerSettings
from cotrain_store.settings.store import PREFIX, StoreSettings, with_password_of
from cotrain_store.settings.worker import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping


def _names_of(settings: type[StoreSettings]) -> frozenset[str]:
    return frozenset(name.upper() for name in settings.model_fields)


#: Of every process, for tests (`cotrain_store.failpoints`).
FAULTS = frozenset({"FAILPOINTS", "FAILPOINTS_LOG"})
API = _names_of(ServerSettings)
SCHEDULER = _names_of(SchedulerSettings)
WORKER = _names_of(WorkerSettings)
#: Read by clients, which may share a shell with a server.
CLIENT = frozenset({"API_KEY", "BASE_URL", "PROGRESS"})
#: Of `cotrain serve` alone.
SERVE = frozenset({"WORKERS", "GPUS"})
_KNOWN = API | SCHEDULER | WORKER | CLIENT | FAULTS | SERVE


def refused_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Say of each `COTRAIN_*` variable that no process knows what is wrong with it, in a sentence."""
    present = os.environ if environ is None else environ
    names = {name.removeprefix(PREFIX) for name in present if name.startswith(PREFIX)}
    unknown = sorted(PREFIX + name for name in names - _KNOWN - REPLACED_BY.keys())
    removed = removed_variables(present)
    return [f"Unknown settings: {', '.join(unknown)}.", *removed] if unknown else removed


def opened(redis_url: str | None) -> str | None:
    """Check a Redis' URL, and complete it by the password of COTRAIN_REDIS_PASSWORD_FILE. Raises ValueError."""
    if not redis_url:
        return redis_url
    parse_address(redis_url)
    file = os.environ.get(f"{PREFIX}REDIS_PASSWORD_FILE")
    return with_password_of(redis_url, Path(file)) if file else redis_url


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
