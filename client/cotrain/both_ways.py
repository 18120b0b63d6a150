"""A call that is written once, for the client's own loop, and made in either way: blocking or awaited."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from cotrain.background import BackgroundLoop


class OnALoop(Protocol):
    """What has a loop that its calls run on."""

    _loop: BackgroundLoop


S = TypeVar("S", bound=OnALoop)
P = ParamSpec("P")
T = TypeVar("T")


def both_ways(
    work: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]:
    """Make of `async def _x` the methods `x`, which blocks, and `x_async`, to be awaited on any loop."""

    @wraps(work)
    def blocking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(work(self, *args, **kwargs))

    @wraps(work)
    async def awaited(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._loop.run_async(work(self, *args, **kwargs))

    blocking.__name__ = work.__name__.removeprefix("_")
    awaited.__name__ = f"{blocking.__name__}_async"
    for method in (blocking, awaited):
        owner = work.__qualname__.rpartition(".")[0]
        method.__qualname__ = f"{owner}.{method.__name__}"
    return blocking, awaited
