"""Generators with yield points, at which the model is free for other work.

The computation is a generator and does not depend on that work; its driver runs it.
"""

import time
import traceback
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
#: Computation with yield points and a return value. It does nothing until driven.
Yielding = Generator[None, None, T]


def run_to_end(work: Yielding[T]) -> T:
    """Run the computation to its end, with nothing at the yield points."""
    return drive(work, lambda: None)[0]


def timed(work: Yielding[T]) -> Yielding[tuple[T, float]]:
    """Return the same work; its result is also the time that it took in s, without that at yield points."""
    own_s = 0.0
    while True:
        began = time.perf_counter()
        try:
            next(work)
        except StopIteration as end:
            return end.value, own_s + time.perf_counter() - began
        own_s += time.perf_counter() - began
        yield


def drive(work: Yielding[T], at_yield: Callable[[], None]) -> tuple[T, float]:
    """Run the computation to its end and call `at_yield` at each yield point; also return the time of those calls
    in s.

    An exception of `at_yield` is raised inside the computation, which stops as if it had failed itself.
    """
    elsewhere_s = 0.0
    try:
        next(work)
        while True:
            began = time.perf_counter()
            try:
                at_yield()
            except BaseException as error:  # noqa: BLE001 - it is raised in the computation
                # The computation may continue without the failed work, and need the memory that
                # its frames hold.
                traceback.clear_frames(error.__traceback__)
                work.throw(error)
            else:
                elsewhere_s += time.perf_counter() - began
                next(work)
    except StopIteration as end:
        return end.value, elsewhere_s
