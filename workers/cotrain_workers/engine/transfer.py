"""Arrays on their way to the device, which does not wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


def to_device(
    source: np.ndarray | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy what lies on the host to the device, in its own type or in `dtype`.

    On CUDA through pinned memory, so that neither side waits: a copy from memory that the system may
    move waits for all that the device still has to do. torch keeps the pinned block until it is read.
    On the CPU the tensor may share the memory of `source`.
    """
    tensor = torch.as_tensor(source)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)
