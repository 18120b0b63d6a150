"""A method that is written once and called in either way: plainly, or as code for an event loop does."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from cotrain.requests.futures import Submitted

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from cotrain.requests.event_loop_thread import BackgroundLoop
    from cotrain.requests.futures import Future


class OnALoop(Protocol):
    """What has a loop that its calls run on."""

    _loop: BackgroundLoop


S = TypeVar("S")
Looped = TypeVar("Looped", bound=OnALoop)
P = ParamSpec("P")
T = TypeVar("T")


def both_ways(
    work: Callable[Concatenate[Looped, P], Coroutine[Any, Any, T]],
) -> tuple[
    Callable[Concatenate[Looped, P], T], Callable[Concatenate[Looped, P], Coroutine[Any, Any, T]]
]:
    """Make of `async def _x` the methods `x`, which blocks, and `x_async`, to be awaited on any loop."""

    @wraps(work)
    def blocking(self: Looped, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(work(self, *args, **kwargs))

    @wraps(work)
    async def awaited(self: Looped, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._loop.run_async(work(self, *args, **kwargs))

    blocking.__name__ = work.__name__.removeprefix("_")
    awaited.__name__ = f"{blocking.__name__}_async"
    for method in (blocking, awaited):
        owner = work.__qualname__.rpartition(".")[0]
        method.__qualname__ = f"{owner}.{method.__name__}"
    return blocking, awaited


def submitted(
    send: Callable[Concatenate[S, P], Future[T]],
) -> Callable[Concatenate[S, P], Submitted[T]]:
    """Make of the method `x`, which sends a request, its twin `x_async`: it sends at once, too."""

    @wraps(send)
    def sent(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Submitted[T]:
        return Submitted(send(self, *args, **kwargs))

    sent.__name__, sent.__qualname__ = f"{send.__name__}_async", f"{send.__qualname__}_async"
    sent.__doc__ = f"Send a `{send.__name__}`; await it for the future, once the server has it."
    # For `help()` alone: a type checker reads the annotations of this function.
    signature = inspect.signature(send)
    given = f"Submitted{str(signature.return_annotation).removeprefix('Future')}"
    sent.__signature__ = signature.replace(return_annotation=given)  # type: ignore[attr-defined]
    return sent
