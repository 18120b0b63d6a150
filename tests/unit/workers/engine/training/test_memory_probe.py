"""Measurements of micro-batches, with a meter that counts the tensors saved by autograd instead of CUDA memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.lora.backend import find_backend
from cotrain_workers.engine.model.activation_checkpointing import Choice
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.memory_model import Budget
from cotrain_workers.engine.training.memory_probe import CPU_TOKENS, measure, measure_tower, size_micro_batches
from tests.support.training import NewEngine


def waves(base: BaseModel) -> partial[ForwardBackward]:
    backend = find_backend("seg", base.targets, base.head_weight)
    return partial(ForwardBackward, base, backend, head_chunk_rows=64)


def saved_bytes(run: Callable[[], bool]) -> int | None:
    by_storage: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        by_storage[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        fitted = run()
    return sum(by_storage.values()) if fitted else None


def test_measured_memory_is_linear_and_smaller_with_recomputation(new_engine: NewEngine) -> None:
    base = new_engine()._base
    bank = AdapterBank(base.targets, torch.device("cpu"), torch.float32)

    found = measure(base, waves(base), bank, saved_bytes)

    assert found.kept is not None
    assert found.recomputed is not None
    assert found.kept.bytes_per_token > 4 * found.recomputed.bytes_per_token
    assert "probe" not in bank


def test_a_probe_that_does_not_fit_is_reported(new_engine: NewEngine) -> None:
    base = new_engine()._base
    bank = AdapterBank(base.targets, torch.device("cpu"), torch.float32)

    def refuse(*_: object) -> None:
        if not base.recompute.is_on:
            raise torch.OutOfMemoryError

    base.backbone.register_forward_pre_hook(refuse)

    found = measure(base, waves(base), bank, saved_bytes)

    assert found.kept is None
    assert found.recomputed is not None


@pytest.mark.parametrize(("fitting", "tokens"), [(10**6, 64), (20, 16)])
def test_the_tower_is_measured_with_the_largest_image_that_fits(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, fitting: int, tokens: int
) -> None:
    base, sizes = new_engine("qwen3-vl")._base, []
    assert base.vision is not None
    run = base.vision._run

    def measured(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        if len(pixels) > 4 * fitting:
            raise torch.OutOfMemoryError
        sizes.append(len(pixels) // 4)
        return run(pixels, grid)

    monkeypatch.setattr(base.vision, "_run", measured)

    peak_bytes, token_bytes = measure_tower(base, lambda run: 7 if run() else None)

    assert (sizes, peak_bytes) == ([tokens], 7)
    assert token_bytes == 2 * 64 * 4  # of the embedding and of one layer, 64 values in fp32
    assert measure_tower(new_engine()._base, lambda _: 7) == (0, 0.0)


@pytest.mark.parametrize(
    ("asked", "choice", "expected"),
    [
        ("auto", "auto", Budget(CPU_TOKENS, sys.maxsize)),
        (512, "never", Budget(512, sys.maxsize)),
        (512, "always", Budget(512, 0)),
    ],
)
def test_on_a_cpu_nothing_is_measured(new_engine: NewEngine, asked: int, choice: Choice, expected: Budget) -> None:
    base = new_engine()._base

    assert size_micro_batches(base, waves(base), asked, choice, adapter_bytes=0) == expected


def test_the_measured_size_is_part_of_the_numerics(new_engine: NewEngine) -> None:
    assert new_engine().facts.numerics.micro_batch_tokens == CPU_TOKENS
    assert new_engine().facts.numerics_id == new_engine(micro_batch_tokens=CPU_TOKENS).facts.numerics_id
