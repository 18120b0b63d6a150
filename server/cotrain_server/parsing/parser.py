"""Where the work on a request's body is done: small ones here and now, large ones elsewhere.

Each tenant has one large piece at a time, and AT_ONCE tenants have theirs at the same time. Two hostile ones
leave room.

Give freed memory back to the host: the allocator of C keeps what threads have freed.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from cotrain_server.limits.tenant_slots import TenantSlots
from cotrain_server.parsing.child import ChildProcess
from cotrain_store.messages.ids import TenantId


def trim_heap() -> None:
    """Give back what is free; does nothing where the C library has no such call (musl, macOS).

    Other threads run on. A heap of a gigabyte takes some milliseconds.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

#: Above this weight, work leaves the event loop: other tenants' requests wait for it otherwise.
THREAD_ABOVE = 256 * 1024
#: And above this one, JSON leaves the process: 32,768 values, of which a third of a second of errors can come.
CHILD_ABOVE = 2 * 1024**2
#: As bytes of Python objects: one value of JSON, and one byte of a message that becomes many objects.
JSON_VALUE_WEIGHT = 64
BINARY_BYTE_WEIGHT = 16
#: As many tenants at once, in threads and in processes. Most of the work lets other threads run: decompression,
#: arrays, digests, tokens.
AT_ONCE = 4
#: Above this weight, what was freed is worth giving back.
_TRIM_ABOVE = 16 * 1024**2
#: What was freed goes back to the host this long after a large body, when its request is over.
_TRIM_AFTER_S = 1.0
#: A process without work costs memory, and one that starts a second.
_CHILD_IDLE_S = 30.0


class Parser:
    """Does one large piece of work per tenant at a time; `close` it."""

    def __init__(self) -> None:
        self._locks = TenantSlots()
        self._threads = ThreadPoolExecutor(AT_ONCE, "parse")
        self._child_threads = ThreadPoolExecutor(AT_ONCE, "parse-child")
        self._children = [ChildProcess() for _ in range(AT_ONCE)]
        #: Without a call; the one that had the last one is at the end.
        self._idle = deque(self._children)
        self._trim: asyncio.TimerHandle | None = None
        self._end_of_idle: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """End the threads and the process."""
        for timer in (self._trim, self._end_of_idle):
            if timer is not None:
                timer.cancel()
        self._threads.shutdown(cancel_futures=True)
        self._child_threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.kill()
        self._child_threads.shutdown()
        for child in self._children:
            child.stop()

    async def run(
        self,
        tenant: TenantId,
        weight: int,
        work: Callable[Arguments, Answer],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """Do some work: here when it is light, in a thread, after its tenant's earlier ones, when it is not."""
        if weight <= THREAD_ABOVE:
            return work(*args, **kwargs)
        call = partial(work, *args, **kwargs)
        return await self._alone(tenant, partial(self._in_thread, weight, call))

    async def parse_json(
        self, tenant: TenantId, weight: int, work: Callable[..., Answer], *args: Any
    ) -> Answer:
        """Do some work on JSON, which is in another process when it is heavy.

        `work` is a function of a module or of a class, and what it takes, gives and raises can be pickled.
        """
        if weight <= CHILD_ABOVE:
            return await self.run(tenant, weight, work, *args)
        return await self.run_in_child(tenant, work, *args)

    async def run_in_child(
        self, tenant: TenantId, work: Callable[..., Answer], *args: Any
    ) -> Answer:
        """Do some work in a process of its own, as `parse_json` takes it.

        Raises:
            BodyTooLarge: it takes more memory or processor time than one call may.
        """
        return await self._alone(tenant, partial(self._in_child, work, args))

    async def _alone(
        self, tenant: TenantId, work: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> Answer:
        async with self._locks.of(tenant):
            # Who hangs up must not begin a second one at the same time: nothing ends a thread.
            working = asyncio.ensure_future(work())
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                await asyncio.wait([working])
                raise

    async def _in_thread(self, weight: int, call: Callable[[], Answer]) -> Answer:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            if weight > _TRIM_ABOVE:
                self._trim_soon()

    async def _in_child(self, work: Callable[..., Answer], args: tuple[Any, ...]) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._child_threads, self._with_child, work, args)
        finally:
            self._end_idle_soon()
            self._trim_soon()

    def _with_child(self, work: Callable[..., Answer], args: tuple[Any, ...]) -> Answer:
        child = self._idle.pop()  # there are as many as threads
        try:
            return child.run(work, *args)
        finally:
            self._idle.append(child)

    def _end_idle_soon(self) -> None:
        if self._end_of_idle is None:
            loop = asyncio.get_running_loop()
            self._end_of_idle = loop.call_later(_CHILD_IDLE_S, self._end_idle_now)

    def _end_idle_now(self) -> None:
        self._end_of_idle = None
        if any(child.pid for child in self._children):
            self._child_threads.submit(self._stop_idle)
            self._end_idle_soon()

    def _stop_idle(self) -> None:
        for _ in self._children:
            try:
                child = self._idle.popleft()
            except IndexError:  # all others are busy
                return
            child.stop(_CHILD_IDLE_S)
            self._idle.append(child)

    def _trim_soon(self) -> None:
        if self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim_now)

    def _trim_now(self) -> None:
        self._trim = None
        self._threads.submit(trim_heap)
