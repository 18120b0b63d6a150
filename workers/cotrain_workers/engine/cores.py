"""On how many cores a thread of this process computes, and when one is better than all."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Self

import torch

#: A thread that computed less than this part of its last steps waited for cores.
BUSY = 0.7
#: What the last step counts in a mean of what was seen.
RECENT = 0.5
#: Steps between two trials of the other number of cores.
TRY_EVERY = 32
#: Of shorter steps the clocks say nothing.
LEAST_S = 0.001


def use_cores(threads: int) -> None:
    """Have this thread compute on `threads` cores, 0: on as many as torch takes, and every later one on a core alone.

    A thread that copies a run or writes a save would else make its first large tensor with a team of its own.
    OpenMP sees more threads than cores from then on, and has all of them sleep where they waited a moment before:
    training took half as long again on a CPU, until the worker ended.
    """
    if threads:
        torch.set_num_threads(threads)
    torch.get_num_threads()  # a thread settles its number when it first asks
    after = threading.Thread(target=torch.set_num_threads, args=(1,))
    after.start()
    after.join()


def keeps_bits() -> bool:
    """Tell whether a product has the same bits on any number of cores: MKL's do in its strict mode."""
    return torch.backends.mkl.is_available() and os.environ.get("MKL_CBWR", "").endswith(",STRICT")


class CoreChoice:
    """Decides whether the next step takes one core or all: whichever took less time of late. Pure.

    One is tried only where the thread waited for cores, so never on an idle host; all are tried again now and then.
    """

    def __init__(self) -> None:
        self.is_alone = False
        self._computed = 1.0
        self._pace_s: dict[bool, float] = {}  # of a step, by whether it was alone
        self._since_trial = TRY_EVERY

    def note(self, wall_s: float, cpu_s: float) -> None:
        """Count the step that was chosen last: how long it took, and how long its thread computed."""
        if wall_s < LEAST_S:
            return
        before_s = self._pace_s.get(self.is_alone, wall_s)
        self._pace_s[self.is_alone] = pace_s = before_s + RECENT * (wall_s - before_s)
        self._since_trial += 1
        if not self.is_alone:
            self._computed += RECENT * (min(1.0, cpu_s / wall_s) - self._computed)
            if self._computed >= BUSY:
                return
        if self._since_trial >= TRY_EVERY:
            self._since_trial = 0
            self.is_alone = not self.is_alone
        elif self._pace_s[not self.is_alone] < pace_s:
            self.is_alone = not self.is_alone


class StepCores:
    """Takes steps of small products on one core where that is faster, as other processes want the cores, else on `threads`.

    The threads of a product wait for each other some sixty times in a step of the decoder, and the one that has no
    core keeps the others waiting for as long as others may compute: eight tokens took 2.5 s on two cores
    and 0.4 s on one of them, where nine threads wanted both.
    """

    def __init__(self, threads: int) -> None:
        self.choice = CoreChoice()
        self._threads = threads
        self._is_alone = False
        self._began_s = (0.0, 0.0)

    def __enter__(self) -> Self:
        self._is_alone = self.choice.is_alone and self._threads > 1
        if self._is_alone:
            torch.set_num_threads(1)
        self._began_s = time.perf_counter(), time.thread_time()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        wall_s, cpu_s = self._began_s
        self.choice.note(time.perf_counter() - wall_s, time.thread_time() - cpu_s)
        if self._is_alone:
            use_cores(self._threads)
