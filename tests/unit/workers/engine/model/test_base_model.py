from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig

from cotrain_workers.engine.model.base_model import find_targets, load_base_model, make_skeleton
from cotrain_workers.engine.model.configuration import UnsupportedModel
from cotrain_workers.engine.model.families import MODEL_TYPES
from tests.support.tiny_models import FAMILIES, build_tiny
from tests.support.training import ModelFolder


@pytest.mark.parametrize("family", ["qwen3", "phi3", "nemotron", "gemma3-wrapped"])
def test_a_family_has_its_targets(model_folder: ModelFolder, family: str) -> None:
    config = AutoConfig.from_pretrained(model_folder(family))
    targets = find_targets(make_skeleton(config))

    names = [target.name for target in targets]
    inside = "model.language_model" if family == "gemma3-wrapped" else "model"
    first = "o_proj" if family == "phi3" else "q_proj"
    assert names[0] == f"{inside}.layers.0.self_attn.{first}"
    assert names[-1] == "lm_head"
    modules = MODEL_TYPES[config.get_text_config().model_type].modules
    assert len(names) == len(set(names)) == 2 * (len(modules) - 1) + 1


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(("family", "tied"), [*((family, False) for family in FAMILIES), ("qwen3", True)])
def test_the_targets_are_those_that_peft_chooses(model_folder: ModelFolder, family: str, tied: bool) -> None:
    skeleton = make_skeleton(AutoConfig.from_pretrained(model_folder(family, tied=tied)))
    targets = find_targets(skeleton)
    names = sorted({target.name.rpartition(".")[-1] for target in targets})

    adapted = inject_adapter_in_model(LoraConfig(r=1, target_modules=names), skeleton)

    assert [(target.name, target.inputs, target.outputs) for target in targets] == [
        (name, layer.in_features, layer.out_features)
        for name, layer in adapted.named_modules()
        if isinstance(layer, LoraLayer)
    ]


def test_a_module_that_is_not_a_plain_linear_is_refused_by_name(model_folder: ModelFolder) -> None:
    skeleton = make_skeleton(AutoConfig.from_pretrained(model_folder()))
    skeleton.model.layers[1].mlp.up_proj = torch.nn.Bilinear(1, 1, 1)
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj is a Bilinear"):
        find_targets(skeleton)
    skeleton.model.layers[1].mlp.up_proj = torch.nn.Linear(1, 1)
    del skeleton.lm_head
    with pytest.raises(UnsupportedModel, match="no modules named lm_head"):
        find_targets(skeleton)


def test_a_missing_model_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere cannot be served: there is no such folder"):
        load_base_model(
            str(tmp_path / "nowhere"), device=torch.device("cpu"), dtype=torch.float32, local_files_only=True
        )


def test_no_parameter_of_the_base_model_is_trainable(tmp_path: Path) -> None:
    folder = build_tiny("gemma2", tmp_path, tied=True)

    base = load_base_model(str(folder), device=torch.device("cpu"), dtype=torch.float32, local_files_only=True)

    assert not any(p.requires_grad for p in base.backbone.parameters())
    assert base.final_softcap == 3.0
    assert base.head_weight is base.backbone.get_parameter("embed_tokens.weight")
