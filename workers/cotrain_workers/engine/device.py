"""The processor or GPU that the engine computes on: its memory, copies to it, reproducible bits.

Also whether it still computes at all: some CUDA errors leave a process in which every call fails.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

#: The exit code of a process whose device is lost: its supervisor starts another.
EXIT_CODE = 70
# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER_TRIM_BYTES = 2**31 - 1
#: torch has no type of its own for a CPU, or for a library of CUDA's, that gets no memory.
_SIGNS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class DeviceLost(Exception):
    """No call on this device can succeed any more in this process."""


def check_device(device: torch.device) -> None:
    """Raise DeviceLost unless the device still computes; to be asked after an error."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).add_(1).item()
    except torch.OutOfMemoryError:
        return  # full, and alive
    except RuntimeError as lost:
        raise DeviceLost(str(lost)) from lost


def memory_use(device: torch.device) -> tuple[int, int]:
    """Return the bytes of the device in use, by anything, and all it has; zeros on a CPU. Any thread may ask."""
    if device.type != "cuda":
        return 0, 0
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the device is lost: the worker's own thread will find out
        return 0, 0
    return total - free, total


def make_cuda_deterministic() -> None:
    """Rule out atomics, TF32 and 16-bit reductions, for the whole process."""
    torch.use_deterministic_algorithms(mode=True)
    # Otherwise every new tensor is filled with NaN first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@contextmanager
def unordered_writes() -> Iterator[None]:
    """Let `index_copy_`, `scatter_` and the like write as they come: for places that are all different.

    Under deterministic algorithms they would sort the places on CUDA first, and wait for the device twice
    to check them, which inside a CUDA graph is an error.
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
    """Copy what lies on the host to the device, in its own type or in `dtype`.

    On CUDA through pinned memory, so that neither side waits: a copy from memory that the system may
    move waits for all that the device still has to do. torch keeps the pinned block until it is read.
    On the CPU the tensor may share the memory of `source`; so may one that is on the device already.
    """
    tensor = torch.as_tensor(source)
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


def keep_freed_memory() -> bool:
    """Tell the C allocator not to return freed blocks to the system; return whether it understood.

    glibc gives blocks of more than 32 MB, and often smaller ones, back on every free; the next tensor of
    that size then faults in each of its pages again. Measured on 2 cores: a cycle of 64 tenants takes
    2.4 s instead of 3.0 s to 3.9 s. The price: resident memory stays at its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent outside glibc
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES))


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether the same work may succeed in smaller parts."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def release_memory(device: torch.device) -> None:
    """Give cached blocks back to the device: what is needed next is of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
