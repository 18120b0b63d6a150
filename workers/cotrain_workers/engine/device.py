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
