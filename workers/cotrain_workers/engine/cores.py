"""Number of cores for the threads of this process, and the choice between one core and all of them."""

import os
import threading
import time
from types import TracebackType
from typing import Self

import torch

#: Share of computing time in recent steps below which a thread is considered to wait for cores.
BUSY = 0.7
#: Weight of the last step in a moving average.
RECENT = 0.5
#: Steps between two trials of the other number of cores.
TRY_EVERY = 32
#: Minimum duration in s of a step whose clocks are meaningful.
LEAST_S = 0.001


def use_cores(threads: int) -> None:
    """Make this thread compute on `threads` cores (0: torch's default), and every later thread on one core.

    A thread that copies a run or writes a save would otherwise make its first large tensor with its own team of
    threads. OpenMP then sees more threads than cores, and lets all of them sleep where they spun before. Training
    took half as long again on a CPU, until the worker ended.
    """
    if threads:
        torch.set_num_threads(threads)
    torch.get_num_threads()  # a thread fixes its number at its first query
    after = threading.Thread(target=torch.set_num_threads, args=(1,))
    after.start()
    after.join()


def keeps_bits() -> bool:
    """Return True if a product has the same bits on any number of cores: MKL's in its strict mode."""
    return torch.backends.mkl.is_available() and os.environ.get("MKL_CBWR", "").endswith(",STRICT")


class CoreChoice:
    """Choice of one core or all cores for the next step, by the shorter recent time. Pure.

    One core is tried only if the thread waited for cores, so never on an idle host. All cores are
    tried again every TRY_EVERY steps.
    """

    def __init__(self) -> None:
        self.is_alone = False
        self._computed = 1.0
        self._pace_s: dict[bool, float] = {}  # of a step, by whether it ran on one core
        self._since_trial = TRY_EVERY

    def note(self, wall_s: float, cpu_s: float) -> None:
        """Record the duration of the last step, and the time its thread computed."""
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
    """Context of a step of small products, on one core if that is faster, else on `threads`.

    One core is faster when other processes compete for the cores. The threads of a product wait for each other some
    sixty times in a decoder step. A thread without a core keeps the others waiting for the length of a time slice.
    Eight tokens took 2.5 s on two cores and 0.4 s on one of them, with nine threads competing for both.
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall_s, cpu_s = self._began_s
        self.choice.note(time.perf_counter() - wall_s, time.thread_time() - cpu_s)
        if self._is_alone:
            use_cores(self._threads)
