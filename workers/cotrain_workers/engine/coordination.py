"""Coordination at the base model: yield points of a computation, and lock step of processes that hold a part each.

A computation is a generator. At its yield points the model is free for other work, on which the computation does not
depend; its driver runs both.

To run a layer, all processes of a group gather its weights at once. Each of them therefore runs as many passes of the
base model as the others, of the same kinds in the same order.
"""

import time
import traceback
from collections.abc import Callable, Generator
from enum import IntEnum
from typing import Protocol, TypeVar

T = TypeVar("T")
#: Computation with yield points and a return value. It does nothing until driven.
Yielding = Generator[None, None, T]


def run_to_end(work: Yielding[T]) -> T:
    """Run the computation to its end, with nothing at the yield points."""
    return drive(work, lambda: None)[0]


def timed(work: Yielding[T]) -> Yielding[tuple[T, float]]:
    """Return the same work; its result is also the time that it took in s, without that at yield points.

    An error at a yield point closes the work, instead of being raised in it.
    """
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
    """Run the computation to its end and call `at_yield` at each yield point; also return the time of those calls in s.

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
                # The computation may continue without the failed work, and need the memory that its frames hold.
                traceback.clear_frames(error.__traceback__)
                work.throw(error)
            else:
                elsewhere_s += time.perf_counter() - began
                next(work)
    except StopIteration as end:
        return end.value, elsewhere_s


class Forward(IntEnum):
    """Kind of a pass of the base model. Of several requested kinds the greatest runs first."""

    NONE = 0
    PLAIN = 1  # without gradients
    BACKWARD = 2
    RECOMPUTED = 3  # backward, with decoder layers recomputed

    @property
    def goes_back(self) -> bool:
        """True if the pass has a backward."""
        return self >= Forward.BACKWARD


class LockStep(Protocol):
    """Agreement with the other processes, if any, on the next pass of the base model."""

    @property
    def sharding(self) -> str:
        """Description of the processes that hold the base model: "" for this process alone. No bit depends on it."""

    def await_pass(self, wanted: Forward) -> Forward:
        """Wait until a pass of this kind can run, and return the kind to run it as.

        The two differ in one case: a pass that would keep its layers' values may have to recompute them.
        """


class Alone:
    """Lock step of a process that holds all of its base model."""

    sharding = ""

    def await_pass(self, wanted: Forward) -> Forward:
        """Return at once."""
        return wanted
