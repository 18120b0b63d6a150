"""What processes write in their logs of how far their start is, for who waits in front of a terminal."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

POLL_S = 0.2


class NewLines:
    """The lines that are added to a log from now on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = log.stat().st_size if log.exists() else 0
        self._rest = b""

    def take(self) -> list[str]:
        """Read those that are whole and were not read before."""
        with suppress(OSError), self._log.open("rb") as log:
            if log.seek(0, os.SEEK_END) < self._read:  # emptied: it had grown large
                self._read, self._rest = 0, b""
            log.seek(self._read)
            added = log.read()
            self._read += len(added)
            *whole, self._rest = (self._rest + added).split(b"\n")
            return [line.decode(errors="replace") for line in whole]
        return []


async def follow(lines_by_name: Mapping[str, NewLines], say: Callable[[str], None]) -> None:
    """Say what each process does to start, until cancelled."""
    while True:
        for name, lines in lines_by_name.items():
            for doing in filter(None, map(doing_in, lines.take())):
                say(f"{name}: {doing}")
        await asyncio.sleep(POLL_S)


def doing_in(line: str) -> str | None:
    """Read what a process does to start from a line of its log; None in other lines. Pure."""
    with suppress(ValueError, AttributeError):
        event = json.loads(line)
        if event.get("event") == "starting":
            return str(event.get("doing"))
    return None
