"""Packed against unpacked, for every family: positions restart and no sequence sees another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cotrain_workers import attn, wave
from cotrain_workers.ops import Create, Datum, Pass, PassOutput
from cotrain_workers.spec import AdapterSpec
from tests.support.tiny_models import FAMILIES
from tests.support.training import random_datum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cotrain_workers.engine import Engine
    from cotrain_workers.ops import Op

    NewEngine = Callable[..., Engine]
    ModelFolder = Callable[..., Path]

LENGTHS = (17, 5, 40, 40, 1, 33)  # beside windows of 16 tokens


def datums() -> list[Datum]:
    rng = np.random.default_rng(0)
    return [random_datum(rng, "cross_entropy", length) for length in LENGTHS]


def packed_logprobs(engine: Engine, datums: Sequence[Datum]) -> np.ndarray:
    ops: list[Op] = [
        Create("run", 0, AdapterSpec(4, seed=0)),
        Pass("run", 1, datums, "cross_entropy", {}, needs_grad=False),
    ]
    output = engine.run(ops).outputs["run", 1]
    assert isinstance(output, PassOutput)
    return np.concatenate(output.logprobs)


@torch.no_grad()
def unpacked_logprobs(folder: Path, datums: Sequence[Datum]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for datum in datums:
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None], use_cache=False).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
        found.append(torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked(
    new_engine: NewEngine, model_folder: ModelFolder, family: str
) -> None:
    packed = packed_logprobs(new_engine(family), datums())

    unpacked = unpacked_logprobs(model_folder(family), datums())
    np.testing.assert_allclose(packed, unpacked, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_that_comparison_sees_wrong_positions_and_leaks(
    new_engine: NewEngine, model_folder: ModelFolder, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = unpacked_logprobs(model_folder(family), datums())
    right = wave.pack_row

    def positions_run_on(
        datums: Sequence[Datum], padded: int
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        ids, _, lengths = right(datums, padded)
        return ids, 5 * np.arange(padded), lengths  # rotary embeddings see distances only

    def one_long_sequence(
        datums: Sequence[Datum], padded: int
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        ids, positions, _ = right(datums, padded)
        return ids, positions, [padded]

    for wrong in (positions_run_on, one_long_sequence):
        monkeypatch.setattr(wave, "pack_row", wrong)
        packed = packed_logprobs(new_engine(family), datums())
        assert np.abs(packed - unpacked).max() > 1e-2, wrong.__name__


def test_the_model_does_not_run_without_a_segment_table(new_engine: NewEngine) -> None:
    engine = new_engine()
    ids = torch.zeros(1, 32, dtype=torch.int64)

    with pytest.raises(RuntimeError, match="no segment table"):
        engine._base.backbone(input_ids=ids, use_cache=False)


@pytest.mark.parametrize(
    "asked", [{"s_aux": torch.zeros(1)}, {"is_causal": False}, {"dropout": 0.1}]
)
def test_attention_that_is_not_implemented_is_refused(asked: dict[str, object]) -> None:
    module, x = torch.nn.Identity(), torch.zeros(1, 2, 4, 8)

    with pytest.raises(NotImplementedError, match="does not implement"):
        attn.packed_attention(module, x, x, x, None, scaling=1.0, **asked)  # type: ignore[arg-type]
