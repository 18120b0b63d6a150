"""Workers that die: between two lines, as `kill -9` would have it, with nothing put in order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery.snapshot_file import UNMEASURED
from cotrain_workers.worker.bootstrap import Tuning
from cotrain_workers.worker.loop import WorkerLoop
from tests.support.stack import TUNING, make_worker


class Killed(BaseException):
    """The worker is no more."""


#: Of each thread, whether it is the one in which a worker lives: its prefetch has one of its own, and dies with it alone.
_THREAD = threading.local()


@dataclass(frozen=True)
class Failpoint:
    """Die at the n-th call of a method of the worker's Execution by its own thread, before or after its effect.

    `deaths.survived` is one of what it holds.
    """

    method: str
    call: int = 1
    after: bool = False
    of_weights: bool = False
    """It is a method of the worker's SavedWeights instead."""

    def arm(self, loop: WorkerLoop) -> None:
        """Make that call deadly."""
        role: Any = loop._weights._saved if self.of_weights else loop._execution
        *holders, name = self.method.split(".")
        for holder in holders:
            role = getattr(role, holder)
        original = getattr(role, name)
        calls = 0

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if not getattr(_THREAD, "is_workers", False):
                return original(*args, **kwargs)
            calls += 1
            if calls < self.call:
                return original(*args, **kwargs)
            if self.after:
                original(*args, **kwargs)
            raise Killed

        setattr(role, name, deadly)


def live(loop: WorkerLoop, opened: contextlib.ExitStack) -> bool:
    """Run a worker's whole life; False if it was killed."""
    _THREAD.is_workers = True
    try:
        loop.run()
    except Killed:
        return False
    finally:
        loop.stop()  # its beat ends with it
        _THREAD.is_workers = False
        opened.close()
    return True


@contextlib.asynccontextmanager
async def dying_worker(
    redis_url: str,
    data_dir: Path,
    engine: Engine,
    failpoint: Failpoint,
    *,
    tuning: Tuning = TUNING,
    **settings: float | str,
) -> AsyncIterator[WorkerLoop]:
    """Run a worker until it dies at `failpoint`; leaving the block waits for that."""
    loop, opened = make_worker(redis_url, data_dir, engine, tuning, UNMEASURED, **settings)
    failpoint.arm(loop)
    life = asyncio.create_task(asyncio.to_thread(live, loop, opened))
    try:
        yield loop
        assert not await asyncio.wait_for(asyncio.shield(life), 300), "it was not killed"
    finally:
        loop.stop()
        await life


async def deaths_until(
    answers: asyncio.Future[Any], redis_url: str, data_dir: Path, engine: Engine
) -> int:
    """Run one worker after the other until everything is answered; count those that were killed."""
    deaths = 0
    while not answers.done():
        loop, opened = make_worker(redis_url, data_dir, engine)
        life = asyncio.create_task(asyncio.to_thread(live, loop, opened))
        either: list[asyncio.Future[Any]] = [life, answers]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        loop.stop()
        deaths += not await life
    return deaths
