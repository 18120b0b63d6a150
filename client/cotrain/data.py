"""What a run trains on: chunks of tokens, model inputs, datums."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from cotrain.errors import UnsupportedInput
from cotrain.tensors import DType, TensorData

if TYPE_CHECKING:
    from collections.abc import Iterable

Token = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
"""A token id as the wire can carry it; the server checks it against the base model's vocabulary."""

DTYPE_BY_INPUT: dict[str, DType] = {
    "target_tokens": "int64",
    "weights": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""Element type of every known loss input, for those given as plain lists."""


class EncodedTextChunk(BaseModel):
    """A stretch of token ids."""

    tokens: list[Token]
    type: Literal["encoded_text"] = "encoded_text"


class ImageChunk(BaseModel):
    """An image. Read, so that it can be refused by name: this server trains on text only."""

    type: Literal["image"] = "image"


class ImageAssetPointerChunk(BaseModel):
    """A stored image. Read, so that it can be refused by name."""

    type: Literal["image_asset_pointer"] = "image_asset_pointer"


class DmelChunk(BaseModel):
    """A stretch of audio. Read, so that it can be refused by name."""

    type: Literal["dmel"] = "dmel"


ModelInputChunk = Annotated[
    EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk,
    Field(discriminator="type"),
]


class ModelInput(BaseModel):
    """What the base model reads, in order."""

    chunks: list[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Iterable[int]) -> ModelInput:
        """Make an input of token ids."""
        return cls(chunks=[EncodedTextChunk(tokens=list(tokens))])

    def to_ints(self) -> list[int]:
        """Join the token ids of every chunk. Raises UnsupportedInput where one is not text."""
        return list(chain.from_iterable(_tokens_of(chunk) for chunk in self.chunks))

    @property
    def length(self) -> int:
        """Number of tokens. Raises UnsupportedInput where a chunk is not text."""
        return sum(len(_tokens_of(chunk)) for chunk in self.chunks)


class Datum(BaseModel):
    """One example: row i of every loss input belongs to token i of the model input.

    The caller has shifted already: `model_input` is a sequence without its last token and
    `target_tokens` the same sequence without its first. A loss input may be given as a list, a
    NumPy array, a torch tensor or TensorData.

    Of a model input of n tokens: `target_tokens` int64 `[n]`, and beside it, float32 `[n]`, `weights`
    for cross_entropy, `logprobs` (of the tokens when they were sampled, in nats) and `advantages` for
    the policy losses, `sequence_ratio_mask` for gspo. cross_entropy takes `[n, K]` as well.
    """

    model_config = ConfigDict(protected_namespaces=())

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = Field(default_factory=dict)

    @field_validator("loss_fn_inputs", mode="before")
    @classmethod
    def _convert_arrays(cls, inputs: Any) -> Any:
        if not isinstance(inputs, dict):
            return inputs
        return {name: as_tensor(name, value) for name, value in inputs.items()}


def datums_of(data: Any) -> list[Datum]:
    """List what a caller gave as datums. Raises UnsupportedInput where one is something else."""
    if isinstance(data, Datum):  # which can be iterated over, like every pydantic model
        raise UnsupportedInput("data is one Datum; give a list of them")
    datums = list(data)
    for index, datum in enumerate(datums):
        if not isinstance(datum, Datum):
            raise UnsupportedInput(f"data[{index}] is a {type(datum).__name__}, not a Datum")
    return datums


def as_tensor(name: str, value: Any) -> Any:
    """Make TensorData of what a caller may give for a loss input; anything else stays as it is."""
    if isinstance(value, list | tuple):
        return TensorData.of(value, DTYPE_BY_INPUT.get(name))
    if hasattr(value, "tolist") and not isinstance(value, TensorData):
        return TensorData.of(value)
    return value  # TensorData already, or JSON of one


def _tokens_of(chunk: ModelInputChunk) -> list[int]:
    if isinstance(chunk, EncodedTextChunk):
        return chunk.tokens
    raise UnsupportedInput(f"chunks of type {chunk.type} cannot be trained on; send text tokens")
