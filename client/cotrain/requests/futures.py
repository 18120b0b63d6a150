"""Future[T]: a request that was sent, and its later result. Submitted[T]: awaitable acceptance of a request.

Both work from any thread and any event loop, for any number of waiters, any number of times. The
decorators `both_ways` and `submitted` define a method once for blocking and asynchronous callers.
"""

import asyncio
import concurrent.futures
import inspect
import logging
import os
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from typing_extensions import override

from cotrain.errors import ClientClosed
from cotrain.requests.background_loop import NOT_PICKLED, BackgroundLoop, check_not_forked
from cotrain.transport.progress import PROGRESS

T = TypeVar("T")
Value = TypeVar("Value")

log = logging.getLogger("cotrain")


class Future(Generic[T]):
    """Future of one result. A caller that waits, or stops waiting, does not affect the others.

    A failure that was never raised to a caller is logged once, when the future is collected.
    """

    def __init__(
        self,
        accepted: concurrent.futures.Future[Any],
        outcome: concurrent.futures.Future[T],
        *,
        what: str = "a request",
        ends_with_its_waits: bool = False,
    ) -> None:
        """Wrap `outcome`; `what` names the request in the log if it fails.

        With `ends_with_its_waits`, cancelling the last task that awaits the future cancels the request.
        """
        self._accepted = accepted
        self._outcome = outcome
        self._what = what
        self._ends_with_its_waits = ends_with_its_waits
        self._waits: set[object] = set()
        self._pid = os.getpid()
        self._given_up = False
        self._was_raised = False

    def done(self) -> bool:
        """Return True if the result, or the failure, is available."""
        return self._outcome.done()

    def cancel(self) -> bool:
        """Cancel the future for all waiters. Return False if it is already done.

        A sample is also cancelled on the server. A training request already has its `seq_id` in the run's
        order, so the server still executes it.
        """
        self._given_up = self._outcome.cancel() or self._given_up
        return self._given_up

    def result(self, timeout: float | None = None) -> T:
        """Block this thread until the result is available, and return it.

        Raises RequestFailed if the server failed the request, and APIError if it could not be sent or polled. Raises
        TimeoutError after `timeout` seconds (the request continues: wait again), and CancelledError after `cancel`.
        """
        if self._outcome.done():
            return self._value_of(self._outcome)
        with self._waiting():
            return self._value_of(self._outcome, timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - public API
        """Await the result; raises the errors of `result`."""
        await self._settle(self._outcome, timeout)
        return self._value_of(self._outcome)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def accepted_async(self) -> None:
        """Await until the server has accepted the request; raises the error if it was rejected."""
        await self._settle(self._accepted)
        self._value_of(self._accepted)

    async def _settle(
        self,
        awaited: concurrent.futures.Future[Any],
        timeout: float | None = None,  # noqa: ASYNC109 - passed on
    ) -> None:
        if awaited.done():
            return
        with self._waiting():
            try:
                await _settled(awaited, timeout)
            except TimeoutError:
                raise self._still_running(timeout) from None
            except asyncio.CancelledError:
                if self._ends_with_its_waits and len(self._waits) == 1:
                    self.cancel()
                raise

    def _value_of(self, settled: concurrent.futures.Future[Value], timeout: float | None = None) -> Value:
        try:
            return settled.result(timeout)
        except CancelledError:
            if self._given_up:
                raise
            raise ClientClosed("the client was closed before this result came") from None
        except BaseException as error:
            # After a timeout, the failure itself has not been raised yet.
            self._was_raised = self._was_raised or settled.done()
            if isinstance(error, TimeoutError) and not settled.done():
                raise self._still_running(timeout) from None
            raise

    def _still_running(self, timeout: float | None) -> TimeoutError:
        after = "" if timeout is None else f" after {timeout:g} s"
        message = f"{self._what} is {self._state()}{after}: wait again for the same future"
        return TimeoutError(message)

    def _state(self) -> str:
        if not self._outcome.done():
            is_accepted = self._accepted is not self._outcome and self._accepted.done()
            return "still running" if is_accepted else "still on its way to the server"
        if self._outcome.cancelled():
            return "given up" if self._given_up else "lost: the client was closed"
        error = self._outcome.exception()
        return "done" if error is None else f"failed: {error}"

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._what}: {self._state()}>"

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        check_not_forked(self._pid)
        wait = object()
        self._waits.add(wait)
        try:
            with PROGRESS.waiting(lambda: f"{self._what}, {self._state()}"):
                yield
        finally:
            self._waits.discard(wait)

    def __del__(self) -> None:
        if not self._was_raised:
            self._outcome.add_done_callback(partial(_log_failure, self._what))

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"this is a Future: await it, or call .result(), before .{name}", name=name, obj=self)


class Submitted(Coroutine[Any, Any, Future[T]]):
    """A request in flight, with its position in the order reserved. Every `_async` method returns one.

    Awaiting it returns the `Future` once the server has accepted the request. `result_async` and `result`
    wait for the result directly. It is sent even if it is never awaited. It also works where a coroutine
    is required (`asyncio.create_task`, `asyncio.run`).
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self._steps: dict[object, Coroutine[Any, Any, Future[T]]] = {}

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._future!r}>"

    def done(self) -> bool:
        """Return True if the result, or the failure, is available."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the future; see `Future.cancel`."""
        return self._future.cancel()

    def result(self, timeout: float | None = None) -> T:
        """Block this thread for the result; see `Future.result`."""
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - public API
        """Await the result; see `Future.result_async`."""
        return await self._future.result_async(timeout)

    @override
    def __await__(self) -> Generator[Any, None, Future[T]]:
        return self._accept().__await__()

    @override
    def send(self, value: Any, /) -> Any:
        """Resume the coroutine; for event loops."""
        return self._step(lambda steps: steps.send(value))

    @override
    def throw(self, *raised: Any) -> Any:
        """Raise an exception in the coroutine; for event loops."""
        return self._step(lambda steps: steps.throw(*raised))

    @override
    def close(self) -> None:
        """Close the coroutine; for event loops. The request continues."""
        if (steps := self._steps.pop(_task_here(), None)) is not None:
            steps.close()

    def _step(self, go_on: Callable[[Coroutine[Any, Any, Future[T]]], Any]) -> Any:
        # One coroutine for each task, so that any number may wait. Created on first use, because a coroutine
        # that never ran makes Python warn that it was never awaited.
        task = _task_here()
        if task not in self._steps:
            self._steps[task] = self._accept()
        try:
            return go_on(self._steps[task])
        except BaseException:  # StopIteration included: the coroutine has ended
            self._steps.pop(task, None)
            raise

    async def _accept(self) -> Future[T]:
        await self._future.accepted_async()
        return self._future

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"this is a request that was sent: await it for its Future, or call .result(), before .{name}",
                name=name,
                obj=self,
            )


def join_futures(
    loop: BackgroundLoop, parts: Sequence[Future[Any]], result: Coroutine[Any, Any, T], *, what: str
) -> Future[T]:
    """Return a future that is accepted when all parts are. It fails with the first failure of a part."""

    async def accept() -> None:
        for each in parts:
            await each.accepted_async()

    return Future(loop.start(accept()), loop.start(result), what=what)


async def _settled(
    future: concurrent.futures.Future[Any],
    timeout: float | None,  # noqa: ASYNC109 - passed on
) -> None:
    """Wait on the caller's loop until `future` is done, whatever its outcome. Raises TimeoutError."""
    # Not asyncio.wrap_future: it would cancel the request when one of its waiters is cancelled.
    loop = asyncio.get_running_loop()
    is_settled = asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the waiter's loop is closed, so it waits no longer
            loop.call_soon_threadsafe(is_settled.set)

    future.add_done_callback(wake)
    async with asyncio.timeout(timeout):
        await is_settled.wait()


def _task_here() -> object:
    with suppress(RuntimeError):  # no loop runs here
        return asyncio.current_task()
    return None


def _log_failure(what: str, outcome: concurrent.futures.Future[Any]) -> None:
    if not outcome.cancelled() and (error := outcome.exception()) is not None:
        log.warning("%s failed, and its result was never asked for: %s", what, error)


class OnALoop(Protocol):
    """Object with an event loop that runs its calls."""

    _loop: BackgroundLoop


S = TypeVar("S")
Looped = TypeVar("Looped", bound=OnALoop)
P = ParamSpec("P")


def both_ways(
    work: Callable[Concatenate[Looped, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[Concatenate[Looped, P], T], Callable[Concatenate[Looped, P], Coroutine[Any, Any, T]]]:
    """Return, for `async def _x`, the methods `x` (blocks) and `x_async` (awaitable on any loop)."""

    @wraps(work)
    def blocking(self: Looped, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(work(self, *args, **kwargs))

    @wraps(work)
    async def awaited(self: Looped, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._loop.run_async(work(self, *args, **kwargs))

    work.__qualname__ = work.__qualname__.replace("._", ".", 1)  # for errors of arguments
    blocking.__name__ = work.__name__.removeprefix("_")
    awaited.__name__ = f"{blocking.__name__}_async"
    for method in (blocking, awaited):
        owner = work.__qualname__.rpartition(".")[0]
        method.__qualname__ = f"{owner}.{method.__name__}"
    return blocking, awaited


def submitted(send: Callable[Concatenate[S, P], Future[T]]) -> Callable[Concatenate[S, P], Submitted[T]]:
    """Return `x_async` for the method `x`, which sends a request. It also sends when called."""

    @wraps(send)
    def sent(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Submitted[T]:
        return Submitted(send(self, *args, **kwargs))

    sent.__name__, sent.__qualname__ = f"{send.__name__}_async", f"{send.__qualname__}_async"
    sent.__doc__ = f"Send a `{send.__name__}`; await it for the future, once the server has it."
    # Only for `help()`: a type checker reads the annotations of this function.
    signature = inspect.signature(send)
    given = f"Submitted{str(signature.return_annotation).removeprefix('Future')}"
    sent.__signature__ = signature.replace(return_annotation=given)  # type: ignore[attr-defined]
    return sent
