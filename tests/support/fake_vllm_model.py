"""Model of the fake vLLM server: a tiny real model with plain PEFT adapters, one sequence at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoTokenizer

from tests.support.shared_base import load_plain, twin


class TinyModel:
    """Base model and loaded adapters by name."""

    def __init__(self, folder: Path) -> None:
        self.base = base_of(folder)
        self.tokenizer = tokenizer_of(folder)
        self.adapted: dict[str, Any] = {}
        self.drops_experts = False  # loads no LoRA of experts, without an error

    def load(self, name: str, path: str, unembedding: str) -> None:
        """Load a PEFT folder. `unembedding` determines the handling of LoRA on the head.

        Raises ValueError if it is "refused" and the adapter has it, and OSError if there is no such
        folder.
        """
        config = (Path(path) / "adapter_config.json").read_text()
        has_head = "lm_head" in json.loads(config)["target_modules"]
        if has_head and unembedding == "refused":
            raise ValueError(f"While loading {path}, expected target modules in {{'q_proj'}}")
        tensors = sorted(each.read_bytes() for each in Path(path).glob("*.safetensors"))
        key = (self.base, config, *tensors, has_head and unembedding, self.drops_experts)
        if (model := _read.get(key)) is None:
            model = _read[key] = self._with_adapter(path)
            if has_head and unembedding == "ignored":
                model.base_model.model.lm_head.lora_B["default"].weight.data.zero_()
            for each, parameter in model.named_parameters():
                if self.drops_experts and ".experts." in each and "lora_B" in each:
                    parameter.data.zero_()
        self.adapted[name] = model

    def _with_adapter(self, path: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tied embeddings, and deprecated names of transformers
            return PeftModel.from_pretrained(twin(self.base), path, low_cpu_mem_usage=True)

    def logits(self, model: str, tokens: list[int]) -> torch.Tensor:
        """Return the logits after each token, fp32 `[len(tokens), vocabulary]`."""
        network = self.adapted.get(model, self.base)
        with torch.no_grad():
            logits: torch.Tensor = network(input_ids=torch.tensor([tokens])).logits[0]
        return logits


#: Models with an adapter, by everything that determines their results. A test of one server loads few.
_read: dict[tuple[Any, ...], Any] = {}


@cache
def base_of(folder: Path) -> Any:
    """Return the base model of all servers over a folder, in eval mode."""
    return load_plain(folder, torch.float32)


@cache
def tokenizer_of(folder: Path) -> Any:
    """Return the tokenizer of a model, read once."""
    return AutoTokenizer.from_pretrained(folder)


def choose(logits: torch.Tensor, body: Mapping[str, Any], generator: torch.Generator) -> int:
    """Return a token drawn from the last position's logits `[vocabulary]`."""
    if body["temperature"] == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / body["temperature"], -1)
    ranked, order = probabilities.sort(descending=True)
    keep = ranked.cumsum(-1) - ranked < body.get("top_p", 1.0)
    if body.get("top_k", -1) > 0:
        keep[body["top_k"] :] = False
    drawn = torch.multinomial(ranked * keep, 1, generator=generator)
    return int(order[drawn])


def scores(logprobs: torch.Tensor, token: int, k: int) -> dict[int, float]:
    """Return log-probs in vLLM's order: of the token itself, then of the `k` most probable."""
    best = logprobs.topk(k).indices.tolist() if k else []
    return {each: float(logprobs[each]) for each in (token, *best)}
