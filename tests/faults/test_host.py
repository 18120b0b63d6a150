"""The host of the trials: its requests reach its processes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.faults.host import Host
from tests.faults.orders import Nursery

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_process_stopped_before_its_pid_is_known_ends(nursery: Nursery, folder: Path) -> None:
    async with Host(nursery, folder) as host:
        host.add_worker("late", "late")
        for _ in range(3):  # its start is ordered but not confirmed yet
            await asyncio.sleep(0)
        assert not host.pid("late")
        await host._end("late", signal.SIGTERM)
        assert host.deaths == []
