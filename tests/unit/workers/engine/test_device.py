from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from cotrain_workers.engine.device import DeviceLost, check_device, unordered_writes

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


IN_A_FRESH_PROCESS = """
import os
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
import cotrain_workers.engine.device
print(os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""


def test_products_on_cuda_may_come_before_an_engine() -> None:
    """torch looks for this once, at the first product, and would refuse all later ones."""
    path = os.pathsep.join(each for each in sys.path if each)
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )

    assert ran.stdout.strip() == ":4096:8"


def test_writes_are_unordered_for_a_moment_only() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        with unordered_writes():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    with unordered_writes():
        pass
    assert not torch.are_deterministic_algorithms_enabled()
