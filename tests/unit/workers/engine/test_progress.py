"""Progress of a start, logged periodically instead of the progress bars of libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from transformers.utils import logging

from cotrain_workers.engine import progress


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(progress, "_listeners", [])
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    progress.listen(lines.append)
    yield lines
    logging.set_tqdm_hook(None)


def test_a_bar_of_the_library_is_reported_in_percent(reported: list[str]) -> None:
    for _ in logging.tqdm(range(4), desc="Loading weights"):
        pass
    assert reported == ["Loading weights: 25%", "Loading weights: 50%", "Loading weights: 75%"]


def test_no_bar_is_drawn(reported: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with progress.ReportedProgress(total=3, unit="B", desc="model.safetensors") as bar:
        bar.update(1)
    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=8
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reported[0] == "model.safetensors: 33%"
    assert len(reported) > 1
    assert "".join(capfd.readouterr()) == ""
