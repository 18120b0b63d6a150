"""What a run trains on: chunks of tokens, model inputs, datums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cotrain.errors import UnsupportedInput
from cotrain.wire.model import Listed, in_a_sentence
from cotrain.wire.tensors import DType, TensorData, read_numbers

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
    """A stretch of token ids: a list, an array, a tensor, or what a tokenizer gave.

    Raises UnsupportedInput, naming the first that is no token id.
    """

    tokens: Listed[Token]
    type: Literal["encoded_text"] = "encoded_text"

    def __init__(self, tokens: Any, type: Literal["encoded_text"] = "encoded_text") -> None:
        try:
            super().__init__(tokens=token_ids(tokens), type=type)
        except ValidationError as refused:
            raise UnsupportedInput(in_a_sentence(refused)) from None

    # For those who make one; what reads the wire has pydantic read it, strictly and faster.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # of pydantic itself

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


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

    chunks: Listed[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Any) -> ModelInput:
        """Make an input of token ids: a list, an array, a tensor, or what a tokenizer gave.

        Raises UnsupportedInput, naming the first that is no token id.
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def empty(cls) -> ModelInput:
        """Make an input of nothing."""
        return cls(chunks=[])

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """Give an input with one chunk more; this one stays as it is."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """Give an input with one token more; this one stays as it is."""
        return self.append(EncodedTextChunk(tokens=[token]))

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

    Of a model input of n tokens: `target_tokens` int64 `[n]`, and with it, float32 `[n]`, `weights`
    for cross_entropy, `logprobs` (of the tokens when they were sampled, in nats) and `advantages` for
    the policy losses, `sequence_ratio_mask` for gspo. cross_entropy takes `[n, K]` as well.
    """

    model_config = ConfigDict(protected_namespaces=())

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = Field(default_factory=dict)

    def __init__(
        self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any] | None = None
    ) -> None:
        given = loss_fn_inputs or {}
        try:
            inputs = {name: as_tensor(name, value) for name, value in given.items()}
            super().__init__(model_input=model_input, loss_fn_inputs=inputs)
        except ValidationError as refused:
            raise UnsupportedInput(in_a_sentence(refused)) from None

    # For those who make one; what reads the wire has pydantic read it, strictly and faster.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # of pydantic itself

    @field_validator("loss_fn_inputs", mode="before")
    @classmethod
    def _convert_arrays(cls, inputs: Any) -> Any:
        if not isinstance(inputs, dict):
            return inputs
        return {name: as_tensor(name, value) for name, value in inputs.items()}


def total_weight(data: Iterable[Datum]) -> float:
    """Add up the weights of datums; 0 where one has none."""
    total = 0.0
    for datum in data:
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            return 0.0
        total += sum(weights.data)
    return total


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
    """Make TensorData of what a caller may give for a loss input; of JSON, nothing.

    Raises UnsupportedInput, naming the loss input.
    """
    if isinstance(value, TensorData | dict):
        return value
    dtype = DTYPE_BY_INPUT.get(name)
    if dtype == "float32" and hasattr(value, "tolist"):
        dtype = None  # an array says itself what it holds
    try:
        return TensorData.of(value, dtype)
    except UnsupportedInput as refused:
        raise UnsupportedInput(f"loss_fn_inputs.{name}: {refused}") from None


def token_ids(given: Any) -> list[int]:
    """List the token ids in what a tokenizer gave. Raises UnsupportedInput, naming the first that is none.

    A tokenizer gives a list, an array, a tensor, or all of it with its masks (`BatchEncoding`); of a
    batch, there must be one.
    """
    ids: Any = given["input_ids"] if isinstance(given, Mapping) and "input_ids" in given else given
    ids = getattr(ids, "ids", ids)  # of the library `tokenizers`
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        message = "tokens must be token ids, such as tokenizer.encode(text)"
        raise UnsupportedInput(f"{message}, not a {type(given).__name__}")
    ids = list(ids)
    if any(isinstance(each, list | tuple) for each in ids[:1]):
        if len(ids) > 1:
            raise UnsupportedInput(f"tokens are a batch of {len(ids)} sequences: give one of them")
        return token_ids(ids[0])
    return read_numbers(ids, "int64", "tokens")


def _tokens_of(chunk: ModelInputChunk) -> list[int]:
    if isinstance(chunk, EncodedTextChunk):
        return chunk.tokens
    raise UnsupportedInput(f"chunks of type {chunk.type} cannot be trained on; send text tokens")
