"""Base models that are read once per process: all engines and oracles of tests share their frozen weights."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from cotrain_workers.engine.coordination import Alone
from cotrain_workers.engine.model.base_model import BaseModel, make_base_model
from cotrain_workers.engine.model.families import MODEL_TYPES, auto_class, drop_towers
from cotrain_workers.engine.model.vision import read_processor


def shared_base(model: str, *, device: torch.device, dtype: torch.dtype, local_files_only: bool) -> BaseModel:
    """Return the result of `load_base_model`, for engines on a CPU unless their test tests the
    model.

    The folder must not change. Tests of `load_base_model` check that its contents are read
    correctly.
    """
    assert local_files_only
    assert device.type == "cpu"
    network, processor = twin(_read(model, dtype)), None
    if MODEL_TYPES[network.config.model_type].reads_images:
        processor = read_processor(model, local_files_only=True)
    if processor is None:
        drop_towers(network)
    return make_base_model(network, network.config, Alone(), processor)


def load_plain(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model as transformers does, with attention that includes all features of the model."""
    return twin(_read(str(folder), dtype))


def twin(network: Any) -> Any:
    """Return another network, with its own modules and hooks, whose weights are in the same memory."""
    shared = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in network.parameters()}
    return deepcopy(network, shared)


@cache
def _read(model: str, dtype: torch.dtype) -> Any:
    config = AutoConfig.from_pretrained(model)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    # SDPA ignores the cap of Gemma 2's scores, and transformers 5.17 uses it nevertheless.
    attention = {"attn_implementation": "eager"} if capped else {}
    network = auto_class(config).from_pretrained(model, dtype=dtype, **attention)
    return network.eval()
