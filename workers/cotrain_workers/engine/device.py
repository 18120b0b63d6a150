"""Device of the engine: determinism, copies to it, and the errors that it raises."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

#: Exit code of a process whose device is lost. Its supervisor starts another process.
EXIT_CODE = 70
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


class DeviceLost(Exception):
    """Error that some CUDA errors leave behind: every later call on the device fails in this process."""


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
