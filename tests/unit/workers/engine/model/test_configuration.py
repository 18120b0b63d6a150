from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, GPT2Config

from cotrain_workers.engine.model.configuration import UnsupportedModel, refuse_unsupported
from tests.support.training import ModelFolder


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
