"""Wait for what nothing tells of: another thread's doing, or another process's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

#: Nothing that is waited for takes so long, however busy the machine is.
PATIENCE_S = 300.0


async def until(happened: Callable[[], object], look_every_s: float = 0.01) -> None:
    """Look again and again whether it has happened; raises TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not happened():  # noqa: ASYNC110  # here for all: only looking tells
            await asyncio.sleep(look_every_s)


async def until_true(look: Callable[[], Awaitable[bool]], look_every_s: float = 0.02) -> None:
    """Ask again and again until it is so; raises TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not await look():  # noqa: ASYNC110  # as above
            await asyncio.sleep(look_every_s)


def files_below(folder: Path, ending: str) -> list[Path]:
    """List the files there are, also while folders are removed: `Path.glob` raises for one that it was about to read."""
    found = [Path(at, name) for at, _, names in os.walk(folder) for name in names]
    return [file for file in found if file.name.endswith(ending)]
