"""Logs of processes: progress of a start, repair of Redis' append-only file, and the reason of Redis' exit."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_server.supervisor.json_log import as_json
from cotrain_server.supervisor.process import CannotServe, Reason
from cotrain_store.disk.embedded_redis import cut_zeros

#: Interval in s at which new log lines are read.
POLL_S = 0.2
#: Maximum number of repeated lines of the reason.
MAX_LINES = 3
_START = "Redis is starting"
#: Log lines, warnings included, that a successful start also writes.
_USUAL = re.compile(
    r"oO0|Redis version=|Valkey version=|Configuration loaded|Server initialized|WARNING|Done loading|monotonic clock"
    r"|Running mode="
)
#: Free disk space below which Redis cannot write its log, and its log lines may be lost.
_FULL_BYTES = 2**20
_NEWER = re.compile(r"Can't handle RDB format version")
_DAMAGED = re.compile(
    r"reading the append only file[^:]*(:.*redis-check-aof.*)?$|AOF loading aborted|AOF manifest|the AOF file .* length|"
    r"AOF .*(doesn't exist|not exist)|Wrong RDB checksum|Wrong signature|Internal error in RDB|Short read or OOM loading DB"
)


async def follow(log_by_name: Mapping[str, TextIO], say: Callable[[str], None]) -> None:
    """Print the startup progress of each process until cancelled. A log has whole lines: each is one write."""
    with ExitStack() as open_logs:
        for log in log_by_name.values():
            open_logs.enter_context(log)
        while True:
            for name, log in log_by_name.items():
                for activity in filter(None, map(startup_activity, log)):
                    say(f"{name}: {activity}")
            await asyncio.sleep(POLL_S)


def startup_activity(line: str) -> str | None:
    """Return the startup activity in a log line, or None for other lines. Pure."""
    with suppress(ValueError, AttributeError):
        event = json.loads(line)
        if event.get("event") == "starting":
            return str(event.get("doing"))
    return None


def mend_log(folder: DataFolder, binary: Path, say: Callable[[str], None]) -> None:
    """Cut trailing zeros that a power failure left in the append-only file. Raises CannotServe if it cannot."""
    try:
        cut = cut_zeros(binary, folder.redis)
    except OSError as error:
        raise CannotServe(
            f"The log of Redis in {folder.redis} cannot be read, or not be copied before zeros are cut off its end: "
            f"{error.strerror or error}. Free some space, and start again."
        ) from error
    if cut is None:
        return
    line = (
        f"cut {cut.zero_bytes} zero bytes off the end of {cut.file}, as a power cut leaves them: nothing in them was "
        f"acknowledged; the file as it was: {cut.kept}"
    )
    say(f"redis: {line}")
    log = folder.open_log("redis")
    try:
        with suppress(OSError):
            os.write(log, f"{as_json(line, 'redis', datetime.now(UTC))}\n".encode())
    finally:
        os.close(log)


def reason_of_redis(folder: DataFolder, binary: Path, lines: Sequence[str]) -> Reason | None:
    """Return the reason of Redis' exit from the last lines of its JSON log, or None if unknown."""
    warnings = _warnings(lines)
    text = " ".join(warnings[-MAX_LINES:])
    if any(map(_NEWER.search, warnings)):
        return Reason(
            f"Redis cannot read {folder.redis}: {text} A newer Redis or Valkey than {binary} wrote it. Put that one on "
            "PATH again, as redis-server or valkey-server.",
            is_final=True,
        )
    if any(map(_DAMAGED.search, warnings)):
        return Reason(
            f"Redis cannot read {folder.redis}: {text} The log of accepted requests is damaged, more than a power "
            "cut does, and nothing was changed. Copy the folder, then either restore a backup, or cut the log at the "
            f"damage, which loses the requests behind it: {_fix(folder, binary)}",
            is_final=True,
        )
    if shutil.disk_usage(folder.path).free < _FULL_BYTES:
        return Reason(
            f"The disk of {folder.path} is full, so Redis cannot write its log. Free some space.", is_final=False
        )
    return Reason(text, is_final=False) if warnings else None


def _warnings(lines: Sequence[str]) -> list[str]:
    """Return the warnings of the latest start as sentences, or its last output if it has none."""
    events: list[tuple[str, str]] = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if _START in entry["event"]:
                events.clear()
            events.append((entry["level"], entry["event"].strip().rstrip(".")))
    unusual = [(level, text) for level, text in events if text and not _USUAL.search(text)]
    warnings = [text for level, text in unusual if level == "warning"]
    return [f"{text}." for text in warnings or [text for _, text in unusual]]


def _fix(folder: DataFolder, binary: Path) -> str:
    """Return the command that truncates a log at its first damage.

    A server binary that is started under the name redis-check-aof acts as that tool.
    """
    manifest = folder.redis / "appendonlydir" / "appendonly.aof.manifest"
    file = manifest if manifest.exists() else folder.redis / "appendonly.aof"
    tool = shutil.which("redis-check-aof")
    if tool:
        return f"{tool} --fix {file}"
    return f"bash -c 'exec -a redis-check-aof {binary} --fix {file}'"
