"""Defects of a base model, each reported in one sentence that names it and its remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import close_session, constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils import logging

from cotrain_workers.engine.model import base_model, model_source
from cotrain_workers.engine.model.base_model import load_base_model, make_skeleton
from cotrain_workers.engine.model.configuration import UnsupportedModel
from cotrain_workers.engine.model.model_source import ModelTooLarge, NoModel, UnusableModel
from cotrain_workers.group.sharded_base import read_rows, weight_files
from tests.support.fake_hub import FakeHub
from tests.support.training import ModelFolder

WEIGHTS = "model.safetensors"


def why_not(model: Path | str, kind: type[UnusableModel] = NoModel) -> str:
    """Load an unusable model. Return the error, without the model's name."""
    with pytest.raises(kind) as refused:
        load_base_model(str(model), device=torch.device("cpu"), dtype=torch.float32, local_files_only=True)
    named = f"Base model {model} cannot be served: "
    assert str(refused.value).startswith(named)
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix(named)


@pytest.fixture
def model(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """Copy a valid model, for a test to damage."""
    return shutil.copytree(model_folder("qwen3"), tmp_path / "model")


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_state_space_model_and_an_encoder_are_refused_by_type(tmp_path: Path) -> None:
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "mamba": transformers.MambaConfig(hidden_size=32, num_hidden_layers=1),
        "bert": transformers.BertConfig(**small, intermediate_size=8),
        "clip": transformers.CLIPConfig(),
    }
    for kind, config in configs.items():
        config.save_pretrained(tmp_path / kind)
        assert why_not(tmp_path / kind, UnsupportedModel).startswith(
            f"models of type '{kind}' cannot be trained; Llama, Mistral, Qwen2"
        )


def test_a_type_unknown_to_the_library_is_refused_in_the_same_words(model: Path) -> None:
    change_config(model, model_type="qwen9")
    assert why_not(model, UnsupportedModel).startswith("models of type 'qwen9' cannot be trained")


def test_an_unreadable_configuration_is_named(model: Path) -> None:
    for text in ("{", "[]"):
        (model / "config.json").write_text(text)
        assert why_not(model).startswith("its config.json cannot be read (")
    (model / "config.json").write_text("{}")
    assert why_not(model).startswith("its config.json is missing or has no model_type")


def test_missing_and_truncated_weights_are_refused(model: Path) -> None:
    whole = (model / WEIGHTS).read_bytes()
    for torn in (whole[: len(whole) // 2], b"x" * 1000, b""):
        (model / WEIGHTS).write_bytes(torn)
        assert why_not(model).startswith("its weights cannot be read (")
    (model / WEIGHTS).unlink()
    assert "no file named model.safetensors" in why_not(model)


def test_weights_that_the_library_would_initialize_are_refused(model: Path) -> None:
    weights = load_file(model / WEIGHTS)
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, model / WEIGHTS, metadata={"format": "pt"})
    assert why_not(model).startswith("its weights lack model.layers.1.mlp.up_proj.weight and 1 more")


def test_weights_of_another_shape_are_refused(model: Path) -> None:
    change_config(model, intermediate_size=64)
    assert why_not(model).startswith(
        "its weights lack model.layers.0.mlp.down_proj.weight and 5 more, at least in the shape"
    )


def test_an_impossible_hub_name_is_reported(tmp_path: Path) -> None:
    for name in ("a b", "x/y/z", str(tmp_path / "nowhere")):
        assert why_not(name).startswith("there is no such folder, and a hub id looks like")


def test_an_offline_hub_is_not_reported_as_a_missing_model() -> None:
    message = why_not("someone/misspelt")
    assert "the cache of this host has no model of that name" in message
    assert "COTRAIN_OFFLINE, HF_HUB_OFFLINE" in message


def test_the_answers_of_a_hub_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str) -> str:
        with pytest.raises(NoModel) as refused:
            load_base_model(f"someone/{name}", device=torch.device("cpu"), dtype=torch.float32, local_files_only=False)
        return str(refused.value).partition("served: ")[2]

    with FakeHub() as hub:
        # Same values as HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE at the start of a process.
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        absent, gated, no_model = map(answer, ("absent", "gated", "adapter"))
        close_session()
    assert absent.startswith("the hub has no such model, or shows it only to those")
    assert gated.startswith("the hub asks who you are: accept the model's terms there")
    assert no_model.startswith("its config.json is missing or has no model_type")


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "free_host_bytes", lambda: 100_000)
    assert why_not(model, ModelTooLarge).startswith(
        "there is not enough memory for it (its weights take 0.0 GB, 0.0 GB are free): give a smaller"
    )


def test_running_out_of_memory_while_reading_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    assert why_not(model, ModelTooLarge).startswith("there is not enough memory for it: give a smaller")


def change_weights(model: Path, **changes: torch.Tensor | None) -> None:
    """Write tensors into the model's file, and remove those that are None."""
    weights = {**load_file(model / WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, model / WEIGHTS, metadata={"format": "pt"})


def load(model: Path) -> base_model.BaseModel:
    return load_base_model(str(model), device=torch.device("cpu"), dtype=torch.float32, local_files_only=True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": None, "rope_theta": 1e4}},
    ],
)
def test_an_unknown_rope_type_is_named(model: Path, rope: dict[str, Any]) -> None:
    change_config(model, rope_parameters=None)
    change_config(model, **rope)
    [values] = rope.values()
    kind = str(values.get("rope_type", values.get("type")))
    assert why_not(model, UnsupportedModel) == (
        f"RoPE of type {kind!r} (rope_scaling or rope_parameters of its config.json) is not supported; "
        "default, linear, dynamic, yarn, longrope, llama3, proportional are."
    )


def test_an_unknown_rope_type_of_one_kind_of_layer_is_named(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder("gemma3"), tmp_path / "gemma")
    ropes = json.loads((model / "config.json").read_text())["rope_parameters"]
    for layers in ("full_attention", "sliding_attention"):
        change_config(model, rope_parameters={**ropes, layers: {**ropes[layers], "rope_type": "x"}})
        assert why_not(model, UnsupportedModel).startswith("RoPE of type 'x' (")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "x"}, "KeyError: 'x'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a number of at least 1, not 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 2048"),
        ({"vocab_size": -1}, "vocab_size must be a number of at least 1, not -1"),
        ({"hidden_size": 10**40}, "TypeError: "),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number of at least 0, not nan"),
        ({"pad_token_id": 10**12}, "AssertionError: Padding_idx must be within num_embeddings"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "TypeError: "),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "the frequencies of its"),
        ({"_attn_implementation": 3}, "AttributeError: "),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "attention_factor": float("nan"),
                }
            },
            "attention_factor of its RoPE must be finite, not nan",
        ),
    ],
)
def test_an_invalid_configuration_is_refused(model: Path, changes: dict[str, Any], reason: str) -> None:
    change_config(model, **changes)
    message = why_not(model)
    assert message.startswith(f"its config.json describes no model ({reason}")
    assert message.endswith("): correct it.")


def test_tensors_unused_by_the_configuration_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    biased = shutil.copytree(model_folder("llama"), tmp_path / "biased")
    biases = (f"model.layers.{layer}.self_attn.q_proj.bias" for layer in range(2))
    change_weights(biased, **{name: torch.zeros(64) for name in biases})
    assert why_not(biased).startswith(
        "its weights hold model.layers.0.self_attn.q_proj.bias and 1 more, which the model of its "
        "config.json has no place for"
    )
    short = shutil.copytree(model_folder("llama"), tmp_path / "short")
    change_config(short, num_hidden_layers=1)
    assert why_not(short).startswith("its weights hold model.layers.1.input_layernorm.weight and 8 more, which")


def test_tensors_without_effect_are_accepted(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder("llama", tied=True), tmp_path / "tied")
    embedding = load_file(model / WEIGHTS)["model.embed_tokens.weight"]
    old_buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_weights(model, **{"lm_head.weight": embedding.clone()}, **old_buffer)
    assert torch.equal(load(model).head_weight, embedding)
    change_weights(model, **{"lm_head.weight": embedding + 1})
    assert why_not(model).startswith("its weights hold lm_head.weight with other values than")


def test_a_configuration_with_a_missing_tie_is_named(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder("qwen3", tied=True), tmp_path / "tied")
    change_config(model, tie_word_embeddings=False)
    assert why_not(model) == (
        "its weights lack lm_head.weight: if it shares the embedding's, set tie_word_embeddings to true in config.json."
    )


def test_weights_with_non_finite_results_are_refused(model: Path) -> None:
    head = load_file(model / WEIGHTS)["lm_head.weight"]
    change_weights(model, **{"lm_head.weight": head.sign() * 3e38})
    assert why_not(model).startswith("the results of a first pass are not finite")


def test_an_adapter_in_the_folder_of_a_model_is_named(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert why_not(model).startswith("it holds an adapter as well (adapter_config.json): give the model without it")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_named(model: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(model / WEIGHTS)[name]
    weight[-1, -1] = value
    change_weights(model, **{name: weight})
    assert why_not(model).startswith(f"its weights are not finite: {name} holds NaN or infinity")


def test_a_member_of_a_group_refuses_the_same_weights(model_folder: ModelFolder, tmp_path: Path) -> None:
    model = shutil.copytree(model_folder("llama", tied=True), tmp_path / "tied")

    def read() -> str:
        network = make_skeleton(AutoConfig.from_pretrained(model), torch.float32)
        network.to_empty(device="cpu").tie_weights()
        with pytest.raises(NoModel) as refused:
            read_rows(network, weight_files(str(model), local_files_only=True))
        return str(refused.value)

    whole = load_file(model / WEIGHTS)
    norm, embedding = whole["model.norm.weight"], whole["model.embed_tokens.weight"]
    change_weights(model, **{"lm_head.weight": embedding + 1})
    assert read().startswith("its weights hold lm_head.weight with other values")
    change_weights(model, **{"lm_head.weight": embedding.clone(), "model.norm.weight": norm / 0})
    assert read().startswith("its weights are not finite: model.norm.weight")
    change_weights(model, **{"model.norm.bias": norm})
    assert read().startswith("its weights hold model.norm.bias, which")
    change_weights(model, **{"model.norm.weight": None, "model.norm.bias": None})
    assert read().startswith("its weights lack model.norm.weight, at least")


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(model_source, "_listeners", [])
    monkeypatch.setattr(model_source, "EVERY_S", 0.0)
    model_source.listen(lines.append)
    yield lines
    logging.set_tqdm_hook(None)


def test_a_bar_of_the_library_is_reported_in_percent(reported: list[str]) -> None:
    for _ in logging.tqdm(range(4), desc="Loading weights"):
        pass
    assert reported == ["Loading weights: 25%", "Loading weights: 50%", "Loading weights: 75%"]


def test_no_bar_is_drawn(reported: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with model_source.ReportedProgress(total=3, unit="B", desc="model.safetensors") as bar:
        bar.update(1)
    config = transformers.LlamaConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=8
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reported[0] == "model.safetensors: 33%"
    assert len(reported) > 1
    assert "".join(capfd.readouterr()) == ""
