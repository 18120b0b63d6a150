"""Measurements of a worker before it enters its pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cotrain_store.settings import WorkerSettings
from cotrain_workers.engine.device import DeviceUnfit, check_cuda
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Op, Pass
from cotrain_workers.worker.bootstrap import device_of, known_batch_sizes, measure_throughput, remember_batch_size


@pytest.mark.parametrize("num_tokens", [256, 1024])
def test_the_throughput_is_measured_with_the_requested_tokens(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    engine, trained = new_engine(), []
    run = engine.run

    def counted(ops: Sequence[Op]) -> object:
        trained.append(sum(len(d.tokens) for op in ops if isinstance(op, Pass) for d in op.datums))
        return run(ops)

    monkeypatch.setattr(engine, "run", counted)

    assert measure_throughput(engine, num_tokens) > 0
    assert trained == [0, num_tokens, num_tokens]
    assert "probe" not in engine.adapters


def test_a_measured_size_is_kept_for_later_processes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sizes.json"
    remember_batch_size(path, "H200, 8B", 8192)
    remember_batch_size(path, "H200, 4B", 12288)

    assert known_batch_sizes(path).get("H200, 8B") == 8192
    assert known_batch_sizes(path).get("H100, 8B") is None
    assert [each.name for each in path.parent.iterdir()] == ["sizes.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "many"}', "\x00"])
def test_a_broken_file_is_treated_like_a_missing_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(content)
    assert known_batch_sizes(path).get("a") is None

    remember_batch_size(path, "a", 1024)
    assert known_batch_sizes(path).get("a") == 1024


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (AssertionError("Torch not compiled with CUDA enabled"), "install PyTorch's CUDA build"),
        (RuntimeError("Found no NVIDIA driver on your system. Please check"), "NVIDIA container toolkit"),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."), "newer driver"),
        (RuntimeError("No CUDA GPUs are available"), "CUDA_VISIBLE_DEVICES"),
        (RuntimeError("CUDA error: initialization error\nCUDA kernel errors might be"), "initialization error"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_a_remedy(
    error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("torch.cuda.init", fail)
    cuda, auto, cpu = (WorkerSettings.model_construct(device=each) for each in ("cuda", "auto", "cpu"))

    with pytest.raises(DeviceUnfit, match=remedy):
        device_of(cuda)
    with capture_logs() as logs:
        assert [device_of(each, tmp_path / "none") for each in (auto, cpu)] == ["cpu", "cpu"]
        assert logs == []
        assert device_of(auto, tmp_path) == "cpu"  # with a driver
    assert remedy in logs[0]["reason"]


@pytest.mark.parametrize(
    ("capability", "builds", "fits"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_90a"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
    ],
)
def test_a_gpu_needs_a_torch_with_its_kernels(
    capability: tuple[int, int], builds: list[str], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: builds)

    with nullcontext() if fits else pytest.raises(DeviceUnfit, match="no kernels for this kind of GPU"):
        check_cuda()
