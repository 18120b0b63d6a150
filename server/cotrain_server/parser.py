"""Parser of request bodies: small ones in the event loop, large ones in threads or child processes.

Each tenant has one large task at a time, and AT_ONCE tenants have one concurrently. Tenants of costly bodies take turns
in half of the child processes, so any number of hostile tenants leaves capacity.

A parser in C holds the interpreter lock from the first byte to the last: a million numbers block all other threads of a
process for 0.1 s. So large bodies are parsed in a child process, whose program is `parser_child.py`.
"""

import asyncio
import ctypes
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import structlog

from cotrain_server.errors import BodyTooLarge
from cotrain_server.limits import LoopSlots, TenantSlots
from cotrain_server.parser_child import TOO_LARGE
from cotrain_store.messages.ids import TenantId

log = structlog.get_logger()

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

#: Weight above which work leaves the event loop, so that other tenants' requests do not wait for it.
THREAD_ABOVE = 256 * 1024
#: Weight above which JSON is parsed in a child process: 32,768 values, which can yield errors for a third of a second.
CHILD_ABOVE = 2 * 1024**2
#: Weights in bytes of Python objects: of one JSON value, and of one byte of a message that becomes many objects.
JSON_VALUE_WEIGHT = 64
BINARY_BYTE_WEIGHT = 16
#: Number of concurrent tenants, in threads and in processes each. Most of the work releases the
#: interpreter lock: decompression, arrays, digests, tokens.
AT_ONCE = 4
#: Delay in seconds between a large task and the return of its memory to the host, so that its request has ended.
_TRIM_AFTER_S = 1.0
#: Idle time after which a child process is stopped, in seconds. An idle process costs 35 MB of memory and more. A start
#: takes 0.4 s of processor time, for which the first large pass of a training step would wait.
_CHILD_IDLE_S = 300.0
#: Processor time of one call in seconds. The slowest body within all other limits takes 5 s of one core.
MAX_CPU_S = 15.0
#: Processor time of one call in seconds above which its tenant shares COSTLY_AT_ONCE child processes for COSTLY_FOR_S.
#: A pass of 16 MB as SDKs send it takes 0.1 s, the slowest one 1.4 to 4 s.
COSTLY_S = 0.5
COSTLY_FOR_S = 60.0
COSTLY_AT_ONCE = AT_ONCE // 2
#: Size of each pipe, where the system allows it. A body fills the default, 64 KB, many times.
PIPE_BYTES = 1024**2
#: Settings of the C library: freed memory stays in the process until it is stopped. To get it back from the kernel for
#: each body takes a third of the processor time.
_KEEPS_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(256 * 1024**2), "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
}  # fmt: skip
_TOO_LONG = "The request body takes more than {:g} s of processor time to read. Send it in several requests."


class Parser:
    """Executor of body work, with one large task per tenant at a time. Call `close` at the end."""

    def __init__(self, costly_s: float = COSTLY_S) -> None:
        self._costly_s = costly_s
        #: Time until which a tenant takes one of these slots. A tenant before its first call takes one, too.
        self._costly_until: dict[TenantId, float] = {}
        self._costly_slots = asyncio.Semaphore(COSTLY_AT_ONCE)
        self._locks = TenantSlots()
        self.loop_slots = LoopSlots()
        self._threads = ThreadPoolExecutor(AT_ONCE, "parse")
        self._child_threads = ThreadPoolExecutor(AT_ONCE, "parse-child")
        self._children = [ChildProcess() for _ in range(AT_ONCE)]
        #: Idle children, the most recently used last.
        self._idle = deque(self._children)
        self._trim: asyncio.TimerHandle | None = None
        self._end_of_idle: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Stop the threads and the child processes."""
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
        """Run some work: at once if it is light, else in a thread after its tenant's earlier work."""
        if weight <= THREAD_ABOVE:
            return work(*args, **kwargs)
        async with self._locks.of(tenant):
            return await self._to_the_end(self._threads, partial(work, *args, **kwargs))

    async def parse_json(self, tenant: TenantId, weight: int, work: Callable[..., Answer], *args: Any) -> Answer:
        """Run some work on JSON, in a child process if it is heavy.

        `work` is a function of a module or a class. Its arguments, result and exceptions must support pickling.
        """
        if weight <= CHILD_ABOVE:
            return await self.run(tenant, weight, work, *args)
        return await self.run_in_child(tenant, work, *args)

    async def run_in_child(self, tenant: TenantId, work: Callable[..., Answer], *args: Any) -> Answer:
        """Run some work in a child process. The requirements of `parse_json` apply. Raises BodyTooLarge: it exceeds the
        memory or processor time of one call.
        """
        try:
            async with self._locks.of(tenant), self._slot_of(tenant):
                return await self._to_the_end(self._child_threads, partial(self._with_child, tenant, work, args))
        finally:
            self._end_idle_soon()

    def _slot_of(self, tenant: TenantId) -> AbstractAsyncContextManager[None]:
        is_costly = self._costly_until.get(tenant, math.inf) > time.monotonic()
        return self._costly_slots if is_costly else nullcontext()

    async def _to_the_end(self, threads: ThreadPoolExecutor, call: Callable[[], Answer]) -> Answer:
        working = asyncio.get_running_loop().run_in_executor(threads, call)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            # A client that disconnects must not start a second task concurrently, because a thread cannot be
            # cancelled.
            await asyncio.wait([working])
            raise
        finally:
            self._trim_soon()

    def _with_child(self, tenant: TenantId, work: Callable[..., Answer], args: tuple[Any, ...]) -> Answer:
        child = self._idle.pop()  # one child per thread
        try:
            return child.run(work, *args)
        finally:
            is_costly = child.cpu_s > self._costly_s
            before = self._costly_until.get(tenant, 0.0)
            self._costly_until[tenant] = time.monotonic() + COSTLY_FOR_S if is_costly else before
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


class ChildProcess:
    """One child process, started on first use and controlled through pipes. Only one thread may use it at a time.

    Its memory is freed when it exits. The kernel kills it if one call takes too much memory or processor time.
    """

    def __init__(self, max_cpu_s: float = MAX_CPU_S) -> None:
        self._max_cpu_s = max_cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        #: Processor time of the last call in seconds; infinite if it exceeded a limit.
        self.cpu_s = 0.0
        self._used_at = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Process id; None if it is not running."""
        return None if self._process is None else self._process.pid

    def run(self, work: Callable[..., Answer], *args: Any) -> Answer:
        """Call a module-level function in the child. Return its result or raise its exception. Raises BodyTooLarge:
        more than MAX_BYTES or MAX_CPU_S, or the process crashed. The next call starts another process.
        """
        process = self._process = self._process or _started(self._max_cpu_s)
        assert process.stdin is not None
        assert process.stdout is not None
        self.cpu_s = math.inf
        try:
            pickle.dump((work, args), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            has_worked, answer, cpu_s = pickle.load(process.stdout)  # noqa: S301  # of the same program
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as crashed:
            self.stop()
            log.warning("parser_crashed", status=process.returncode)
            is_late = process.returncode == -signal.SIGPROF
            reason = _TOO_LONG.format(self._max_cpu_s) if is_late else TOO_LARGE
            raise BodyTooLarge(reason) from crashed
        finally:
            self._used_at = time.monotonic()
        if not isinstance(answer, BodyTooLarge):
            self.cpu_s = cpu_s
        if not has_worked:
            raise answer
        return answer  # type: ignore[no-any-return]  # as the function gave it

    def kill(self) -> None:
        """Kill the process during a call, which then raises. Any thread may call this."""
        if (process := self._process) is not None:
            process.kill()

    def stop(self, idle_s: float = 0.0) -> None:
        """Kill the process if it was idle for `idle_s`, and free its memory. Idempotent."""
        process = self._process
        if process is not None and time.monotonic() - self._used_at >= idle_s:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(BrokenPipeError):  # unread input
                    pipe.close()  # type: ignore[union-attr]
            self._process = None


def _started(max_cpu_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cotrain_server.parser_child", str(max_cpu_s)]
    # A separate process group: Ctrl-C is for the parent only, and the child exits when its pipe closes. Not a separate
    # session, between which Linux shares the processors equally, whatever their priorities.
    return subprocess.Popen(  # noqa: S603  # ourselves
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**_KEEPS_MEMORY, **os.environ},
        process_group=0,
        pipesize=PIPE_BYTES,
    )


def trim_heap() -> None:
    """Return free heap memory to the host. Does nothing if the C library has no such call (musl, macOS).

    Other threads continue. A heap of one gigabyte takes some milliseconds.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
