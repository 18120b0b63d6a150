from __future__ import annotations

import pytest
import torch

from cotrain_workers.device import DeviceLost, check_device

CUDA = torch.device("cuda", 0)


def failing_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(_: torch.device) -> None:
        raise error

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)


def test_a_device_on_which_every_call_fails_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(RuntimeError("CUDA error: device-side assert triggered"), monkeypatch)
    with pytest.raises(DeviceLost, match="device-side assert"):
        check_device(CUDA)


def test_a_full_device_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(torch.OutOfMemoryError(), monkeypatch)
    check_device(CUDA)


def test_a_cpu_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(RuntimeError("there is no CUDA here"), monkeypatch)
    check_device(torch.device("cpu"))
