"""Training with yield points, at which the model is free for other work.

What computes is a generator and knows nothing of that work; its driver runs it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
#: A computation with yield points, and what it returns at its end. It does nothing until driven.
Yielding = Generator[None, None, T]


def run_to_end(work: Yielding[T]) -> T:
    """Compute all of it, with nothing at the yield points."""
    return drive(work, lambda: None)[0]


def drive(work: Yielding[T], at_yield: Callable[[], None]) -> tuple[T, float]:
    """Compute all of it and call `at_yield` at each yield point; also return what that took, in s.

    What `at_yield` raises is raised inside the computation, which stops as if it had failed itself.
    """
    elsewhere_s = 0.0
    try:
        next(work)
        while True:
            began = time.perf_counter()
            try:
                at_yield()
            except BaseException as error:  # noqa: BLE001 - it is raised in the computation
                # The computation may go on without what failed, and need what its frames hold.
                traceback.clear_frames(error.__traceback__)
                work.throw(error)
            else:
                elsewhere_s += time.perf_counter() - began
                next(work)
    except StopIteration as end:
        return end.value, elsewhere_s
