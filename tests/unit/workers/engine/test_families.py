"""Every family of models: training, sampling, export and recovery against transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cotrain_workers.engine.model.base_model import load_base_model
from cotrain_workers.engine.model.families import MODEL_TYPES
from docs.models import PAGE, described, model_type_of, rows
from tests.support.families import TOLERANCE, first_of_a_kind, measure
from tests.support.tiny_models import EVERY, build_tiny
from tests.support.training import ModelFolder


@pytest.mark.parametrize("family", first_of_a_kind(EVERY))
def test_a_family_computes_as_transformers_and_peft(model_folder: ModelFolder, tmp_path: Path, family: str) -> None:
    measured = measure(model_folder(family), tmp_path)

    assert measured.largest < TOLERANCE
    assert measured.is_alone_equal
    assert measured.is_restored
    assert measured.is_greedy_equal


def test_experts_of_a_square_weight_are_merged_with_inputs_before_outputs(tmp_path: Path) -> None:
    """The shape of a square weight, such as that of gpt-oss-20b, does not show whether inputs or outputs come first."""
    folder = build_tiny("gpt_oss", tmp_path / "model", hidden=40)

    assert measure(folder, tmp_path / "adapter").merged < TOLERANCE


def test_experts_are_merged_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Published files of Qwen3-VL MoE have inputs before outputs, which transformers changes when it reads them."""
    folder = build_tiny("qwen3-vl-moe", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    turned = {name: each.mT.contiguous() for name, each in weights.items() if ".experts." in name}
    save_file(weights | turned, folder / "model.safetensors", {"format": "pt"})

    assert measure(folder, tmp_path / "adapter").merged < TOLERANCE


def test_every_supported_type_has_a_family() -> None:
    inner = {name for name, kind in MODEL_TYPES.items() if kind.is_inner}  # `qwen3_vl_text`
    assert {model_type_of(family) for family in EVERY} == set(MODEL_TYPES) - inner


def test_the_page_lists_every_family() -> None:
    written = rows(PAGE.read_text(encoding="utf-8"))

    assert list(written) == list(described(EVERY))
    assert all(0 < difference < TOLERANCE for difference in written.values())


def test_a_tower_is_left_out(tmp_path: Path) -> None:
    folder = build_tiny("gemma3-wrapped", tmp_path, tied=True)

    base = load_base_model(str(folder), device=torch.device("cpu"), dtype=torch.float32, local_files_only=True)

    assert base.path == "model.language_model"
    assert base.architecture == "Gemma3ForConditionalGeneration"
    assert all(each.name.startswith(base.path) for each in base.targets[:-1])
    assert base.num_parameters == sum(each.numel() for each in base.backbone.parameters())


@pytest.mark.parametrize("longest", [256, 128])
def test_a_stretched_rope_is_served_up_to_its_first_length(tmp_path: Path, longest: int) -> None:
    folder = build_tiny("phi4-mini", tmp_path, context=512)
    config = json.loads((folder / "config.json").read_text())
    config["original_max_position_embeddings"] = longest
    config["rope_parameters"]["original_max_position_embeddings"] = longest
    (folder / "config.json").write_text(json.dumps(config))

    base = load_base_model(str(folder), device=torch.device("cpu"), dtype=torch.float32, local_files_only=True)

    assert base.context_length == longest
    rotary: Any = base.backbone.get_submodule("rotary_emb")
    short, long = (torch.tensor([[0, last]]) for last in (1, 500))
    x = torch.zeros(1, 2, 8)
    before = rotary(x, short)[0]
    rotary(x, long)  # by itself it would change the frequencies
    assert torch.equal(rotary(x, short)[0], before)
