"""Tell an error that means "not enough memory" from any other, and let go of what an allocator hoards."""

from __future__ import annotations

import torch

#: torch has no type of its own for a CPU, or for a library of CUDA's, that gets no memory.
_SIGNS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether the same work may succeed in smaller parts."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def release_memory(device: torch.device) -> None:
    """Give cached blocks back to the device: what is needed next is of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
