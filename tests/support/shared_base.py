"""Base models that are read once in a process: all engines and oracles of tests share their frozen weights."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cotrain_workers.engine.lock_step import Alone
from cotrain_workers.engine.model.base_model import BaseModel, make_base_model


def shared_base(
    model: str, *, device: torch.device, dtype: torch.dtype, local_files_only: bool
) -> BaseModel:
    """Return what `load_base_model` does; engines on a CPU whose model is none of their test's take it.

    The folder must stay as it is. That what is read is right, is proven where `load_base_model` is tested.
    """
    assert local_files_only
    assert device.type == "cpu"
    network = twin(_read(model, dtype))
    return make_base_model(network, network.config, Alone())


def load_plain(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model as transformers has it, with attention that computes all that the model says."""
    return twin(_read(str(folder), dtype))


def twin(network: Any) -> Any:
    """Return another network, with modules and hooks of its own, whose weights lie in the same memory."""
    shared = {
        id(each): nn.Parameter(each.detach(), requires_grad=False) for each in network.parameters()
    }
    return deepcopy(network, shared)


@cache
def _read(model: str, dtype: torch.dtype) -> Any:
    capped = getattr(AutoConfig.from_pretrained(model), "attn_logit_softcapping", None)
    # SDPA leaves out the cap of Gemma 2's scores, and transformers 5.17 takes it all the same.
    attention = {"attn_implementation": "eager"} if capped else {}
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **attention)
    return network.eval()
