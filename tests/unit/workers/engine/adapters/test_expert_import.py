"""Uploads of adapters with experts: of PEFT's parameters, of one module for each expert, and of Tinker's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save

from cotrain_server.adapter_upload.peft_config import read_adapter
from cotrain_server.errors import Invalid
from cotrain_store.blobs.folder import Folder
from cotrain_store.bodies.import_body import encode_import
from cotrain_workers.checkpoints.peft_folder import CONFIG, TENSORS, key_of, write_folder
from cotrain_workers.engine.adapters.peft_import import TINKER, ImportRefused, read_import
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights, Import, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.op_codec import peft_adapter
from tests.support.draws import variant
from tests.support.mixtures import SOME, random_weights
from tests.support.shared_base import load_plain
from tests.support.training import ModelFolder, NewEngine, random_datum

EXPERTS = "model.layers.1.mlp.experts"


def imported(engine: Engine, config: bytes, tensors: bytes) -> HostWeights:
    """Return an upload as the worker reads it."""
    adapter = peft_adapter(encode_import(read_adapter(config, tensors, seed=3)))
    return read_import(adapter, engine.adapters.layout_of, 16, {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        *((family, ("gate_up_proj", "down_proj")) for family in SOME),
        (SOME[0], ("down_proj",)),
        *(variant(family, ("down_proj",)) for family in SOME[1:]),
    ],
)
def test_an_adapter_of_peft_gives_its_values(
    new_engine: NewEngine, model_folder: ModelFolder, tmp_path: Path, family: str, parameters: tuple[str, ...]
) -> None:
    network: Any = load_plain(model_folder(family), torch.float32)
    network.set_experts_implementation("eager")
    config = LoraConfig(
        r=5,
        lora_alpha=9,
        target_modules=["q_proj"],
        target_parameters=[f"mlp.experts.{each}" for each in parameters],
        rank_pattern={"experts.down_proj": 4},
    )
    torch.manual_seed(0)
    model = get_peft_model(network, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) / 20
    model.save_pretrained(tmp_path)

    engine = new_engine(family)
    settings, tensors = ((tmp_path / name).read_bytes() for name in (CONFIG, TENSORS))
    upload = peft_adapter(encode_import(read_adapter(settings, tensors, seed=3)))
    assert upload.spec.per_expert
    datum = random_datum(np.random.default_rng(0), "cross_entropy", 40)
    forward = Pass("run", 1, [datum], "cross_entropy", {}, needs_grad=False)
    ours = engine.run([Import("run", 0, upload), forward]).outputs["run", 1]

    assert isinstance(ours, PassOutput), ours
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
    theirs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy()
    assert np.abs(theirs - ours.logprobs[0]).max() < 1e-5


def exported(engine: Engine, spec: AdapterSpec, root: Path) -> tuple[HostWeights, bytes, Path]:
    """Return random weights, and the configuration and the folder of their export."""
    weights = random_weights(engine, "run", spec)
    layout = engine.adapters.layout_of(spec)
    folder = root / key_of(write_folder(Folder(root), weights, layout, "base").digest)
    return weights, (folder / CONFIG).read_bytes(), folder


def same(found: HostWeights, weights: HostWeights) -> bool:
    """Return True if two adapters have equal matrices, whatever their seeds and alphas."""
    return found.spec.per_expert == weights.spec.per_expert and torch.equal(found.flat, weights.flat)


@pytest.mark.parametrize("per_expert", [False, True])
def test_an_export_comes_back_to_the_bit(new_engine: NewEngine, tmp_path: Path, per_expert: bool) -> None:
    engine = new_engine("qwen2_moe")
    spec = AdapterSpec(5, seed=1, per_expert=per_expert)
    weights, config, folder = exported(engine, spec, tmp_path)
    assert same(imported(engine, config, (folder / TENSORS).read_bytes()), weights)

    # Without the note, the copies are matrices of their own, and gate and up have the rank of both.
    tensors = load_file(folder / TENSORS)
    found = imported(engine, config, save(tensors))
    assert (found.spec.rank, found.spec.per_expert) == (10, True)

    name = f"base_model.model.{EXPERTS}.base_layer.lora_B.weight"
    tensors[name][0, -1] = 1.0  # of gate, in a rank of up
    with pytest.raises(ImportRefused, match="gate and up have no ranks of their own"):
        imported(engine, config, save(tensors, {"experts": "shared_outer"}))


def renamed(
    engine: Engine, weights: HostWeights, tensors: Mapping[str, torch.Tensor], form: str
) -> dict[str, torch.Tensor]:
    """Return an export with the names and shapes of another form."""
    plain = {name: each for name, each in tensors.items() if ".experts." not in name}
    layout = engine.adapters.layout_of(weights.spec)
    views = layout.views(weights.flat)
    at_tinker = {product: name for name, product in TINKER.items()}
    for module in layout.gate_by_experts:
        for product, name in at_tinker.items():
            for letter, matrices in zip("AB", views[f"{module}.{product}"], strict=True):
                if form == "tinker":
                    key = f"base_model.model.{module}.{name}.lora_{letter}.weight"
                    plain[key] = matrices.contiguous()
                    continue
                for at, each in enumerate(matrices):
                    key = f"base_model.model.{module}.{at}.{product}.lora_{letter}.weight"
                    plain[key] = each.contiguous()
    return plain


@pytest.mark.parametrize(("form", "per_expert"), [("tinker", False), ("tinker", True), ("index", True)])
def test_other_names_of_experts_are_read(new_engine: NewEngine, tmp_path: Path, form: str, per_expert: bool) -> None:
    engine = new_engine("qwen3_moe")
    spec = AdapterSpec(4, seed=1, per_expert=per_expert)
    weights, config, folder = exported(engine, spec, tmp_path)
    fields = json.loads(config)
    for key in ("rank_pattern", "alpha_pattern", "target_parameters", "target_modules"):
        fields[key] = None
    tensors = renamed(engine, weights, load_file(folder / TENSORS), form)

    assert same(imported(engine, json.dumps(fields).encode(), save(tensors)), weights)


def test_experts_of_another_model_are_refused_by_name(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("qwen3_moe")
    _, config, folder = exported(engine, AdapterSpec(4, seed=1, train_attn=False), tmp_path)
    content = (folder / TENSORS).read_bytes()
    with pytest.raises(ImportRefused, match=r"needs \[7 \* rank, 64\] and \[48, rank \* 7\]"):
        imported(new_engine("qwen2_moe"), *without_layer_0(config, folder))
    with pytest.raises(ImportRefused, match=r"has no module model\.layers\.0\.mlp\.experts"):
        imported(new_engine("qwen3"), config, content)

    fields = {**json.loads(config), "target_parameters": ["experts.down_proj"]}
    with pytest.raises(Invalid, match=r"target_parameters of adapter_config\.json does not name"):
        imported(engine, json.dumps(fields).encode(), content)


def without_layer_0(config: bytes, folder: Path) -> tuple[bytes, bytes]:
    tensors = load_file(folder / TENSORS)
    left = {name: each for name, each in tensors.items() if ".layers.1." in name}
    return config, save(left, {"experts": "shared_outer"})
