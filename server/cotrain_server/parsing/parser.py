"""Where the work on a request's body is done: small ones here and now, large ones elsewhere, one after the other."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cotrain_server.limits.tenant_slots import TenantSlots
from cotrain_server.parsing.child import ChildProcess
from cotrain_server.parsing.heap import trim_heap

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from cotrain_store.messages.ids import TenantId

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

#: Above this weight, work leaves the event loop: other tenants' requests wait for it otherwise.
THREAD_ABOVE = 256 * 1024
#: And above this one, JSON leaves the process.
CHILD_ABOVE = 16 * 1024**2
#: As bytes of Python objects: one value of JSON, and one byte of a message that becomes many objects.
JSON_VALUE_WEIGHT = 64
BINARY_BYTE_WEIGHT = 16
#: More threads would only wait for one another, and the event loop for all of them.
_THREADS = 2
#: What was freed goes back to the host this long after a large body, when its request is over.
_TRIM_AFTER_S = 1.0
#: A process without work costs memory, and one that starts a second.
_CHILD_IDLE_S = 30.0


class Parser:
    """Does one large piece of work per tenant at a time; `close` it."""

    def __init__(self) -> None:
        self._locks = TenantSlots()
        self._threads = ThreadPoolExecutor(_THREADS, "parse")
        self._child_thread = ThreadPoolExecutor(1, "parse-child")
        self._child = ChildProcess()
        self._trim: asyncio.TimerHandle | None = None
        self._end_of_child: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """End the threads and the process."""
        for timer in (self._trim, self._end_of_child):
            if timer is not None:
                timer.cancel()
        self._threads.shutdown(cancel_futures=True)
        self._child_thread.submit(self._child.stop)
        self._child_thread.shutdown()

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
        call = partial(self._child.run, work, *args)
        return await self._alone(tenant, partial(self._in_child, weight, call))

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
            self._trim_soon(weight)

    async def _in_child(self, weight: int, call: Callable[[], Answer]) -> Answer:
        loop = asyncio.get_running_loop()
        if self._end_of_child is not None:
            self._end_of_child.cancel()
        try:
            return await loop.run_in_executor(self._child_thread, call)
        finally:
            self._end_of_child = loop.call_later(
                _CHILD_IDLE_S, self._child_thread.submit, self._child.stop
            )
            self._trim_soon(weight)

    def _trim_soon(self, weight: int) -> None:
        if weight > CHILD_ABOVE and self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim_now)

    def _trim_now(self) -> None:
        self._trim = None
        self._threads.submit(trim_heap)
