"""Memory and cores of the host that the engine runs on."""

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

#: Parameters of `mallopt`, from malloc.h of glibc, and the greatest threshold.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER_TRIM_BYTES = 2**31 - 1
MEMINFO = Path("/proc/meminfo")
#: Control group that a container sees as its own. Outside a container it has no limit.
CGROUP = Path("/sys/fs/cgroup")
#: List of the control groups of this process.
OWN_CGROUPS = Path("/proc/self/cgroup")
_LIMIT_IN_CGROUP_V1 = "memory.limit_in_bytes"
#: Share of computing time in recent steps below which a thread is considered to wait for cores.
BUSY = 0.7
#: Weight of the last step in a moving average.
RECENT = 0.5
#: Steps between two trials of the other number of cores.
TRY_EVERY = 32
#: Minimum duration in s of a step whose clocks are meaningful.
LEAST_S = 0.001


def keep_freed_memory() -> bool:
    """Make the C allocator keep freed blocks; return True on success.

    glibc returns blocks of more than 32 MB, and often smaller ones, to the system on every free. The next tensor of
    that size then faults in each of its pages again. Measured on 2 cores: a cycle of 64 tenants takes 2.4 s instead of
    3.0 s to 3.9 s. The cost: resident memory stays at its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent outside glibc
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES))


def free_host_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the free bytes of the host, or of this container's limit if that is less.

    Pages that the kernel can reclaim count as free.
    """
    of_host = _available(meminfo)
    try:
        limit = int((cgroup / "memory.max").read_text())
        cached = _page_cache_bytes(cgroup / "memory.stat")
        used = int((cgroup / "memory.current").read_text()) - cached
    except (OSError, ValueError):  # another kind of control group, or the limit "max"
        return of_host
    return max(0, min(of_host, limit - used))


def memory_limit_bytes(cgroup: Path = CGROUP, own: Path = OWN_CGROUPS) -> int:
    """Return the least of these limits: of this process, of its control groups, and the memory of the host."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (*_limit_files(cgroup, own), cgroup / "memory.max", cgroup / "memory" / _LIMIT_IN_CGROUP_V1):
        with contextlib.suppress(OSError, ValueError):  # no such group, or the limit "max"
            limits.append(int(file.read_text()))
    limits += [
        soft
        for soft, _ in map(resource.getrlimit, (resource.RLIMIT_AS, resource.RLIMIT_DATA))
        if soft != resource.RLIM_INFINITY
    ]
    return min(limits)


def _limit_files(cgroup: Path, own: Path) -> Iterator[Path]:
    """Yield the files with the memory limits of a process' own groups, of cgroup version 2 or 1."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield cgroup / path.lstrip("/") / "memory.max"
            elif "memory" in controllers.split(","):
                yield cgroup / "memory" / path.lstrip("/") / _LIMIT_IN_CGROUP_V1


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _page_cache_bytes(statistics: Path) -> int:
    """Return the bytes of files in the page cache of a control group. They count as used, but can be reclaimed."""
    try:
        lines = statistics.read_text().splitlines()
    except OSError:
        return 0
    rows = dict(line.split() for line in lines)
    return sum(int(rows.get(name, 0)) for name in ("active_file", "inactive_file"))


def _available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux: use the total
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib_by_name = {line.split(":")[0]: line.split()[1] for line in lines}
    return int(kib_by_name["MemAvailable"]) * 1024


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
