"""Random pictures, sequences with pictures, and transformers and PEFT as a reference for them."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import AutoImageProcessor, GenerationConfig
from typing_extensions import override

from cotrain_workers.engine.ops import Datum, Image
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.pictures import RULES, picture
from tests.support.training import PeftOracle, random_datum

PLACEHOLDER, SIDE = RULES["token"], RULES["side"]


def image(start: int, height: int, width: int, seed: int = 0) -> Image:
    """Return an image of `height` times `width` tokens."""
    return Image(start, height, width, picture(seed, SIDE * width, SIDE * height))


def with_images(datum: Datum, *images: Image) -> Datum:
    """Return a datum whose tokens are placeholders within images."""
    tokens = datum.tokens.copy()
    for each in images:
        tokens[each.start : each.start + each.tokens] = PLACEHOLDER
    return Datum(tokens, datum.inputs, images=images)


def pictured_datum(rng: np.random.Generator, length: int, *images: Image) -> Datum:
    """Return a random datum for cross_entropy with images."""
    return with_images(random_datum(rng, "cross_entropy", length), *images)


class ImageOracle(PeftOracle):
    """Plain PEFT with the processor of transformers, one sequence at a time."""

    def __init__(self, folder: Path, spec: AdapterSpec) -> None:
        super().__init__(folder, spec, torch.float32)
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)

    def inputs(self, tokens: np.ndarray, images: Sequence[Image]) -> dict[str, Any]:
        """Return the arguments of a model for a sequence."""
        ids = torch.from_numpy(tokens)[None]
        given: dict[str, Any] = {"input_ids": ids}
        if images:
            opened = [PIL.Image.open(BytesIO(each.data)) for each in images]
            given |= dict(self._processor(images=opened, return_tensors="pt"))
            given["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        return given

    @override
    def logprobs(self, datum: Datum) -> torch.Tensor:
        """Return the log-probabilities of a datum's targets."""
        self.model.base_model.model.model.rope_deltas = None  # of the sequence before
        given = self.inputs(datum.tokens, datum.images)
        logits = self.model(**given).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]

    @torch.no_grad()
    def generated(self, tokens: np.ndarray, images: Sequence[Image], count: int) -> list[int]:
        """Return the greedy continuation of a sequence."""
        given = self.inputs(tokens, images)
        settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
        mask = torch.ones_like(given["input_ids"])
        found = self.model.generate(**given, attention_mask=mask, generation_config=settings)
        continued: list[int] = found[0, len(tokens) :].tolist()
        return continued
