"""Polling for events without a notification, such as those of other threads and processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

#: Time limit in seconds of every wait, even on a busy machine.
PATIENCE_S = 300.0


async def until(happened: Callable[[], object], look_every_s: float = 0.01) -> None:
    """Poll until `happened` returns a true value. Raises TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not happened():  # noqa: ASYNC110  # only polling is possible, for all of these
            await asyncio.sleep(look_every_s)


def wait_until(happened: Callable[[], object], look_every_s: float = 0.05) -> None:
    """Poll as `until`, in a test without an event loop."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(look_every_s)


async def until_true(look: Callable[[], Awaitable[bool]], look_every_s: float = 0.02) -> None:
    """Poll until `look` returns True. Raises TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not await look():  # noqa: ASYNC110  # as above
            await asyncio.sleep(look_every_s)


def files_below(folder: Path, ending: str) -> list[Path]:
    """Return the existing files, even while folders are being removed, for which `Path.glob` raises."""
    found = [Path(at, name) for at, _, names in os.walk(folder) for name in names]
    return [file for file in found if file.name.endswith(ending)]
