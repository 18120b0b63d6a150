"""A CUDA device: made to compute the same bits again, and asked whether it still computes at all.

Some CUDA errors leave a process in which every call fails.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# torch looks for it at the first product on CUDA in a process, whoever makes it, and never again: products
# are refused ever after if it was not there and deterministic algorithms are asked for later.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

#: How a process ends whose device is lost. Whoever started it starts it again.
EXIT_CODE = 70


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
