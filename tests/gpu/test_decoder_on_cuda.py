"""The decoder on CUDA; `bench/engine_check.py` and `bench/decode.py` print the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding import model_runner as model_runner
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from tests.support.decoding import (
    finish,
    gap_to_trainer,
    graph_report,
    is_same_alone,
    output,
    request,
    trained_weights,
)
from tests.support.tiny_models import FAMILIES, build_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_tiny(request.param, tmp_path)


def test_logprobs_are_the_trainers(folder: Path) -> None:
    engine = Engine.load(str(folder), device="cuda", dtype=torch.float32)

    assert gap_to_trainer(engine).largest < 5e-5


def test_logprobs_in_bf16_are_near_the_trainers(folder: Path) -> None:
    engine = Engine.load(str(folder), device="cuda")

    assert gap_to_trainer(engine).mean < 0.02


def test_a_seeded_request_gives_the_same_tokens_in_any_batch(folder: Path) -> None:
    assert is_same_alone(Engine.load(str(folder), device="cuda", dtype=torch.float32))


def test_graphs_are_used_and_agree_with_the_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pages, heads and widths that the flash kernel and the grouped products take.
    engine = Engine.load(str(build_tiny("qwen3", tmp_path, hidden=128)), device="cuda")
    weights = trained_weights(engine)
    mine = request("mine", np.arange(100), "all-8", num_samples=5, max_tokens=40)

    decoder = engine.decoder(weights.__getitem__, kv_tokens=8192, text=None)
    with_graphs = output(decoder, mine)
    report = graph_report(decoder)
    monkeypatch.setattr(model_runner, "kernel_takes", lambda *args: False)
    monkeypatch.setattr(model_runner, "groups_take", lambda *args: False)
    plain = output(engine.decoder(weights.__getitem__, kv_tokens=8192, text=None), mine)

    assert report == "2 in use", report
    gaps = [
        np.abs(one.logprobs - other.logprobs)[: same_prefix(one.tokens, other.tokens)]
        for one, other in zip(with_graphs.sequences, plain.sequences, strict=True)
    ]
    assert np.concatenate(gaps).mean() < 0.02


def same_prefix(ours: np.ndarray, theirs: np.ndarray) -> int:
    """Return how many tokens two samples share from the start."""
    differ = np.flatnonzero(ours != theirs)
    return int(differ[0]) if len(differ) else len(ours)


def test_many_requests_finish_in_little_memory(tmp_path: Path) -> None:
    engine = Engine.load(str(build_tiny("qwen3", tmp_path)), device="cuda")
    weights = trained_weights(engine)
    keys = [None, *weights]
    decoder = engine.decoder(weights.__getitem__, kv_tokens=256 * 16, text=None)

    found = finish(
        decoder,
        [
            request(f"r{at}", np.arange(at % 90 + 1), keys[at % 8], max_tokens=60, seed=at)
            for at in range(100)
        ],
    )

    assert all(isinstance(result, SampleOutput) for result in found.values())
