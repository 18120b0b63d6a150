"""Environment variables of each process, and startup progress from their logs.

Each process receives only its own `COTRAIN_*` variables, and an unknown variable is refused as a
typo. `follow` prints the progress of a start on the terminal.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
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


def refused_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return an error sentence if there are unknown `COTRAIN_*` variables."""
    present = os.environ if environ is None else environ
    names = {name.removeprefix(PREFIX) for name in present if name.startswith(PREFIX)}
    unknown = sorted(PREFIX + name for name in names - _KNOWN)
    return [f"Unknown settings: {', '.join(unknown)}."] if unknown else []


def opened(redis_url: str | None) -> str | None:
    """Validate a Redis URL, and add the password of COTRAIN_REDIS_PASSWORD_FILE. Raises ValueError."""
    if not redis_url:
        return redis_url
    parse_address(redis_url)
    file = os.environ.get(f"{PREFIX}REDIS_PASSWORD_FILE")
    return with_password_of(redis_url, Path(file)) if file else redis_url


def environment(
    names: frozenset[str], given: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a process's environment: ours, with only its own variables. `given` overrides inherited values."""
    names |= FAULTS
    inherited = os.environ if environ is None else environ
    own = {f"{PREFIX}{name}": value for name, value in given.items() if name in names}
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(PREFIX) or name.removeprefix(PREFIX) in names
    }
    return {**kept, **own}


POLL_S = 0.2


class NewLines:
    """New lines of a log from now on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = log.stat().st_size if log.exists() else 0
        self._rest = b""

    def take(self) -> list[str]:
        """Return the complete lines that were not read before."""
        with suppress(OSError), self._log.open("rb") as log:
            if log.seek(0, os.SEEK_END) < self._read:  # emptied because it had grown large
                self._read, self._rest = 0, b""
            log.seek(self._read)
            added = log.read()
            self._read += len(added)
            *whole, self._rest = (self._rest + added).split(b"\n")
            return [line.decode(errors="replace") for line in whole]
        return []


async def follow(lines_by_name: Mapping[str, NewLines], say: Callable[[str], None]) -> None:
    """Print the startup progress of each process until cancelled."""
    while True:
        for name, lines in lines_by_name.items():
            for doing in filter(None, map(doing_in, lines.take())):
                say(f"{name}: {doing}")
        await asyncio.sleep(POLL_S)


def doing_in(line: str) -> str | None:
    """Return the startup activity in a log line, or None for other lines. Pure."""
    with suppress(ValueError, AttributeError):
        event = json.loads(line)
        if event.get("event") == "starting":
            return str(event.get("doing"))
    return None
