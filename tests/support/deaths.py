"""Workers that are killed between two statements, as by `kill -9`, without cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery.recovery_copies import UNMEASURED
from cotrain_workers.worker.bootstrap import Tuning
from cotrain_workers.worker.loop import WorkerLoop
from tests.support.stack import TUNING, Home, Stack, make_worker


class Killed(BaseException):
    """Simulated kill of the worker."""


#: For each thread, True if it runs a worker. The prefetch thread is not one, and ends only with its worker.
_THREAD = threading.local()


@dataclass(frozen=True)
class Failpoint:
    """Simulated kill at the n-th call of a method of the worker's Execution in its main thread.

    It happens before or after the effect of the call. `deaths.survived` is a method of one of its
    parts.
    """

    method: str
    call: int = 1
    after: bool = False
    of_weights: bool = False
    """True if it is a method of the worker's SavedWeights instead."""

    def arm(self, loop: WorkerLoop) -> None:
        """Replace the method by one that kills the worker."""
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
    """Run a worker to its end. Return False if it was killed."""
    _THREAD.is_workers = True
    try:
        loop.run()
    except Killed:
        return False
    finally:
        loop.stop()  # its heartbeat ends too
        _THREAD.is_workers = False
        opened.close()
    return True


@contextlib.asynccontextmanager
async def dying_worker(
    home: Stack | Home, engine: Engine, failpoint: Failpoint, *, tuning: Tuning = TUNING, **settings: float | str
) -> AsyncIterator[WorkerLoop]:
    """Run a worker until it is killed at `failpoint`. Leaving the block waits for that."""
    loop, opened = make_worker(home, engine, tuning, UNMEASURED, **settings)
    failpoint.arm(loop)
    life = asyncio.create_task(asyncio.to_thread(live, loop, opened))
    try:
        yield loop
        assert not await asyncio.wait_for(asyncio.shield(life), 300), "it was not killed"
    finally:
        loop.stop()
        await life


async def deaths_until(answers: asyncio.Future[Any], home: Stack | Home, engine: Engine) -> int:
    """Run one worker after the other until every request is answered. Return the number of killed ones."""
    deaths = 0
    while not answers.done():
        loop, opened = make_worker(home, engine)
        life = asyncio.create_task(asyncio.to_thread(live, loop, opened))
        either: list[asyncio.Future[Any]] = [life, answers]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        loop.stop()
        deaths += not await life
    return deaths
