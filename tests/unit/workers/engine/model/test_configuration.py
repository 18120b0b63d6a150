from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, GPT2Config

from cotrain_workers.engine.model.configuration import UnsupportedModel, eos_token_ids, refuse_unsupported
from tests.support.training import ModelFolder, NewEngine


def changed(model_folder: ModelFolder, **changes: Any) -> Any:
    config = AutoConfig.from_pretrained(model_folder("llama"))
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="type 'gpt2' cannot be trained; Llama, Mistral"):
        refuse_unsupported(GPT2Config())


def test_quantized_and_bidirectional_models_are_refused(model_folder: ModelFolder) -> None:
    with pytest.raises(UnsupportedModel, match="quantized"):
        refuse_unsupported(changed(model_folder, quantization_config={"bits": 4}))
    with pytest.raises(UnsupportedModel, match="clip_qkv"):
        refuse_unsupported(changed(model_folder, clip_qkv=8.0))
    with pytest.raises(UnsupportedModel, match="later tokens"):
        refuse_unsupported(changed(model_folder, use_bidirectional_attention=True))


class Named:
    """Stand-in for settings with end-of-sequence tokens."""

    def __init__(self, eos_token_id: int | list[int] | None) -> None:
        self.eos_token_id = eos_token_id


class Network:
    """Stand-in for a model."""

    def __init__(self, generation: int | list[int] | None, config: int | list[int] | None) -> None:
        self.generation_config = Named(generation)
        self.config = Named(config)


def test_the_end_tokens_are_read_from_the_model(new_engine: NewEngine) -> None:
    assert new_engine().facts.eos_token_ids == (2,)
    assert eos_token_ids(Network([7, 3], 1)) == (3, 7)
    assert eos_token_ids(Network(None, 1)) == (1,)
    assert eos_token_ids(Network(None, None)) == ()
