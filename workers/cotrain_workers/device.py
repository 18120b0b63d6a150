"""Whether the device can still compute: some CUDA errors leave a process in which every call fails."""

from __future__ import annotations

import torch

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
