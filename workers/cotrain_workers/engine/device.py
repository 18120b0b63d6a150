"""Hardware of the engine: its device, and the memory and cores of the host."""

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

#: Exit code of a process whose device is lost. Its supervisor starts another process.
EXIT_CODE = 70
#: Parameters of `mallopt`, from malloc.h of glibc, and the greatest threshold.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER_TRIM_BYTES = 2**31 - 1
#: Parts of the messages of out-of-memory errors without an exception type, in lower case.
_SIGNS = (
    "out of memory",  # CUDA's runtime and driver, pinned host memory, NCCL, Triton
    "out_of_memory",  # names of error codes
    "_alloc_failed",  # CUBLAS_STATUS_…, CUDNN_STATUS_…, CUSOLVER_STATUS_…
    "_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_… and …_HOST_…, from cuDNN 9
    "can't allocate memory",  # torch on a CPU
    "cannot allocate memory",  # ENOMEM
)
#: Part of the message of an error that only reports that an earlier one ended a graph's capture.
_OF_CAPTURE = "previous error during capture"

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


#: Parts of torch's messages when it cannot use a GPU, each with a cause and its remedy.
_UNUSABLE = {
    "not compiled with CUDA": "this build of torch is for CPUs: install PyTorch's CUDA build, in a container with "
    "docker-compose.gpu.yml",
    "no NVIDIA driver": "no NVIDIA driver is visible: install it on the host. A container also needs the NVIDIA container "
    "toolkit and docker-compose.gpu.yml",
    "too old": "the NVIDIA driver is too old for this build of torch: install a newer driver, or a torch for an older CUDA",
    "No CUDA GPUs": "the driver shows no GPU to this process: correct CUDA_VISIBLE_DEVICES, or GPU_ID of "
    "docker-compose.gpu.yml",
    "no kernel image": "this build of torch has no kernels for this kind of GPU: install a torch that has some",
}


class DeviceUnfit(Exception):
    """Error: no GPU can be used in this process. The message states the cause and a remedy."""


class DeviceLost(Exception):
    """Error that some CUDA errors leave behind: every later call on the device fails in this process."""


def check_cuda() -> None:
    """Raise DeviceUnfit unless this process has a GPU that its torch can use. It takes no memory of a GPU."""
    try:
        torch.cuda.init()
        major, minor = torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise _unfit(str(error).splitlines()[0]) from error
    builds = torch.cuda.get_arch_list()
    if not any(_runs_on(each, major, minor) for each in builds):
        raise _unfit(f"no kernel image for sm_{major}{minor}, only for {', '.join(builds)}")


def _runs_on(build: str, major: int, minor: int) -> bool:
    """Return True if code for `build`, such as sm_90a, runs on a GPU of a capability. Code named compute is translated."""
    kind, _, version = build.partition("_")
    own = divmod(int("".join(filter(str.isdigit, version))), 10)
    return own <= (major, minor) and (own[0] == major or kind == "compute")


def _unfit(reason: str) -> DeviceUnfit:
    """Return the error with the cause and the remedy of torch's message, if it is a known one."""
    known = [cause for sign, cause in _UNUSABLE.items() if sign in reason]
    return DeviceUnfit(f"No GPU can be used: {known[0]} ({reason})" if known else f"No GPU can be used: {reason}")


def check_device(device: torch.device) -> None:
    """Raise DeviceLost unless the device still computes. Call it after an error."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).add_(1).item()
    except RuntimeError as error:
        if not is_out_of_memory(error):  # a full device still works
            raise DeviceLost(str(error)) from error


def memory_use(device: torch.device) -> tuple[int, int]:
    """Return the bytes of the device in use by any process, and its total bytes; zeros on a CPU.

    Any thread may call it.
    """
    if device.type != "cuda":
        return 0, 0
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the device is lost: the worker's own thread will detect it
        return 0, 0
    return total - free, total


def make_cuda_deterministic() -> None:
    """Turn off atomics, TF32 and 16-bit reductions, for the whole process."""
    torch.use_deterministic_algorithms(mode=True)
    # Deterministic mode would fill every new tensor with NaN first, which takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextmanager
def unordered_writes() -> Iterator[None]:
    """Allow `index_copy_`, `scatter_` and similar calls to write in any order. The positions must be distinct.

    Under deterministic algorithms they would sort the positions on CUDA first. They would also
    wait for the device twice to check them, which is an error inside a CUDA graph.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(mode=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=True)


def to_device(
    source: np.ndarray | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy host data to the device, in its own type or in `dtype`.

    On CUDA the copy goes through pinned memory, so that neither side waits. A copy from pageable
    memory waits for all pending work of the device. torch keeps the pinned block until it is read.
    The result may share the memory of `source` on a CPU, and if `source` is on the device already.
    """
    tensor = torch.as_tensor(source)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error for lack of memory. The same work may succeed in smaller parts."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    if _OF_CAPTURE in message:
        earlier = error.__cause__ or error.__context__
        return earlier is not None and is_out_of_memory(earlier)
    return any(sign in message for sign in _SIGNS)


def release_memory(device: torch.device) -> None:
    """Return torch's cached blocks to the device. Call it before allocations of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
