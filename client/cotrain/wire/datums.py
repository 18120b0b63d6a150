"""Data of passes: chunks of tokens, model inputs, datums, and the results of a pass over them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, Literal, Never, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    field_serializer,
    field_validator,
)
from typing_extensions import override

from cotrain.errors import UnsupportedInput
from cotrain.wire.model import Listed, OneLine, WireModel, in_a_sentence
from cotrain.wire.tensors import DType, RoutedExperts, TensorData, read_numbers

__all__ = [
    "Datum", "DmelChunk", "EncodedTextChunk", "ForwardBackwardOutput", "ImageAssetPointerChunk", "ImageChunk", "ModelInput",
    "ModelInputChunk",
]  # fmt: skip

Token = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
"""A token id in the wire's range; the server checks it against the base model's vocabulary."""

DTYPE_BY_INPUT: dict[str, DType] = {
    "target_tokens": "int64",
    "weights": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
    "policy_step": "int64",
}
"""Element type of every known loss input, for inputs passed as plain lists."""


class EncodedTextChunk(OneLine):
    """Sequence of token ids, from a list, an array, a tensor, or the output of a tokenizer.

    Raises UnsupportedInput, which names the first invalid element.
    """

    tokens: Listed[Token]
    type: Literal["encoded_text"] = "encoded_text"

    def __init__(self, tokens: Any, type: Literal["encoded_text"] = "encoded_text") -> None:
        try:
            super().__init__(tokens=token_ids(tokens), type=type)
        except ValidationError as refused:
            raise UnsupportedInput(in_a_sentence(refused)) from None

    # Only for callers: pydantic parses wire messages without this `__init__`, strictly and faster.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # of pydantic itself

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


_BASE64 = {
    "type": "string",
    "contentEncoding": "base64",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}


class ImageChunk(OneLine):
    """Image, for a base model that reads images: the bytes of a PNG or JPEG file."""

    data: Annotated[bytes, Field(repr=False), WithJsonSchema(_BASE64)]
    format: Literal["png", "jpeg"]
    expected_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    """Number of its tokens. The server refuses the request if it counts another number."""
    type: Literal["image"] = "image"

    @field_validator("data", mode="before")
    @classmethod
    def _from_base64(cls, data: Any) -> Any:
        return b64decode(data, validate=True) if isinstance(data, str) else data

    @field_serializer("data", when_used="json")
    def _to_base64(self, data: bytes) -> str:
        return b64encode(data).decode()

    @property
    def length(self) -> int:
        """Number of tokens. Raises UnsupportedInput if `expected_tokens` is not set."""
        if self.expected_tokens is None:
            raise UnsupportedInput("ImageChunk has no expected_tokens; the length is unknown without")
        return self.expected_tokens


class ImageAssetPointerChunk(BaseModel):
    """Stored image. Parsed only so that the error can name it: the server fetches nothing."""

    type: Literal["image_asset_pointer"] = "image_asset_pointer"


class DmelChunk(BaseModel):
    """Audio. Parsed only so that the error can name it."""

    type: Literal["dmel"] = "dmel"


def cannot_read(chunk: BaseModel) -> str:
    """Return the sentence about a chunk of a type that no server reads."""
    kind = getattr(chunk, "type", type(chunk).__name__)
    remedy = {"image_asset_pointer": "send the bytes of the image as an image chunk", "image": "send text tokens"}
    return f"chunks of type {kind} cannot be read here; {remedy.get(kind, 'send text tokens or images')}"


ModelInputChunk = Annotated[
    EncodedTextChunk | ImageChunk | ImageAssetPointerChunk | DmelChunk, Field(discriminator="type")
]


class ModelInput(OneLine):
    """Input of the base model: chunks in order."""

    chunks: Listed[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Any) -> ModelInput:
        """Return an input of token ids: a list, an array, a tensor, or the output of a tokenizer.

        Raises UnsupportedInput, which names the first invalid element.
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def empty(cls) -> ModelInput:
        """Return an input without chunks."""
        return cls(chunks=[])

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """Return a copy with one more chunk; this input is unchanged."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """Return a copy with one more token; this input is unchanged."""
        return self.append(EncodedTextChunk(tokens=[token]))

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        are_tokens = all(isinstance(chunk, EncodedTextChunk) for chunk in self.chunks)
        return iter([("length", self.length)]) if are_tokens else super().__repr_args__()

    def to_ints(self) -> list[int]:
        """Return the token ids of all chunks. Raises UnsupportedInput if a chunk is not text."""
        return list(chain.from_iterable(_tokens_of(chunk) for chunk in self.chunks))

    @property
    def has_images(self) -> bool:
        """True if a chunk is an image."""
        return any(isinstance(chunk, ImageChunk) for chunk in self.chunks)

    @property
    def length(self) -> int:
        """Number of tokens. Raises UnsupportedInput for an image without `expected_tokens`, and for audio."""
        return sum(chunk.length if isinstance(chunk, ImageChunk) else len(_tokens_of(chunk)) for chunk in self.chunks)


class Datum(OneLine):
    """Training example. Row i of every loss input belongs to token i of the model input.

    The caller shifts the sequence: `model_input` is the sequence without its last token, and `target_tokens` the same
    sequence without its first. A loss input may be a list, a NumPy array, a torch tensor or TensorData.

    Loss inputs for a model input of n tokens:

    * `target_tokens`: int64 `[n]`, always;
    * `weights`: float32 `[n]`, for cross_entropy;
    * `logprobs` and `advantages`: float32 `[n]`, for the policy losses. Log-probs are those of the tokens
      at sampling time, in nats;
    * `sequence_ratio_mask`: float32 `[n]`, for gspo;
    * `policy_step`: int64 `[n]`, optional for every loss: the optimizer step of the run whose weights sampled each
      target, -1 if none did. It changes no result but the metrics `policy_lag:mean` and `policy_lag:max`.

    For cross_entropy, targets and weights may also be `[n, K]`.

    `routed_experts` replaces the router's choice in a mixture of experts: a row for each token of the model input, from
    samples or `[n, layers, experts of a token]`.
    """

    model_config = ConfigDict(protected_namespaces=())

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData] = Field(default_factory=dict)
    routed_experts: RoutedExperts | None = None

    def __init__(
        self, model_input: ModelInput, loss_fn_inputs: Mapping[str, Any] | None = None, routed_experts: Any = None
    ) -> None:
        given = loss_fn_inputs or {}
        try:
            inputs = {name: as_tensor(name, value) for name, value in given.items()}
            experts = None if routed_experts is None else RoutedExperts.of(routed_experts)
            super().__init__(model_input=model_input, loss_fn_inputs=inputs, routed_experts=experts)
        except ValidationError as refused:
            raise UnsupportedInput(in_a_sentence(refused)) from None

    # Only for callers: pydantic parses wire messages without this `__init__`, strictly and faster.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # of pydantic itself

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield None, self.model_input
        yield from ((name, each.dense_shape) for name, each in self.loss_fn_inputs.items())

    @field_validator("loss_fn_inputs", mode="before")
    @classmethod
    def _convert_arrays(cls, inputs: Any) -> Any:
        if not isinstance(inputs, dict):
            return inputs
        return {name: as_tensor(name, value) for name, value in inputs.items()}


class _Metrics(dict[str, float]):
    """Metrics by name. A missing name is reported with the existing ones."""

    def __missing__(self, name: str) -> float:
        """Raise KeyError."""
        hint = "; the mean loss is the result's attribute .loss" if name == "loss" else ""
        raise KeyError(f"{name} (there are {', '.join(self)}{hint})")


class ForwardBackwardOutput(WireModel):
    """Result of a pass: named arrays per datum in the order sent, and metrics."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    """`logprobs`: float32, in the shape of the datum's `target_tokens`."""
    metrics: Annotated[dict[str, Annotated[float, Field(allow_inf_nan=True)]], AfterValidator(_Metrics)] = Field(
        default={}
    )
    """A name ends in `:` and the reduction over parts of a request: `loss:sum`, `x:mean`."""

    _total_weight: float = PrivateAttr(default=0.0)

    @property
    def loss(self) -> float:
        """`metrics["loss:sum"]`, or the mean per weighted token for cross_entropy whose datums all have weights.

        That mean is `loss:sum / sum of all weights`, in nats, if that sum is above 0. The gradient is
        always that of `loss:sum`.
        """
        total = self.metrics["loss:sum"]
        return total / self._total_weight if self._total_weight > 0 else total

    def __getitem__(self, name: str) -> Never:
        """Raise TypeError, which names the attributes."""
        raise TypeError(f"a result has no [{name!r}]: use .loss, .metrics or .loss_fn_outputs")

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        if "loss:sum" in self.metrics:
            yield "loss", float(f"{self.loss:.6g}")
        yield "datums", len(self.loss_fn_outputs)
        arrays = [outputs["logprobs"] for outputs in self.loss_fn_outputs if "logprobs" in outputs]
        yield "targets", sum(len(each.data) for each in arrays)
        if "clock_cycle:unique" in self.metrics:
            yield "cycle", int(self.metrics["clock_cycle:unique"])

    def with_total_weight(self, total_weight: float) -> Self:
        """Return the same result with `loss` per weight. For the client that sent the weights."""
        weighted = self.model_copy()
        weighted._total_weight = total_weight
        return weighted


def total_weight(data: Iterable[Datum]) -> float:
    """Return the sum of the weights of all datums; 0 if a datum has no weights."""
    total = 0.0
    for datum in data:
        weights = datum.loss_fn_inputs.get("weights")
        if weights is None:
            return 0.0
        total += sum(weights.data)
    return total


def is_unshifted(datum: Datum) -> bool:
    """Return True if the targets equal the input, so that each token would predict itself."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if datum.model_input.has_images:
        return False
    tokens = datum.model_input.to_ints()
    # A sequence of one repeated token is equal after a shift, too.
    return targets is not None and targets.data == tokens and len(set(tokens)) > 1


def datums_of(data: Any) -> list[Datum]:
    """Return the caller's datums as a list. Raises UnsupportedInput if an element is not a Datum."""
    if isinstance(data, Datum):  # iterable, like every pydantic model
        raise UnsupportedInput("data is one Datum; give a list of them")
    datums = list(data)
    for index, datum in enumerate(datums):
        if not isinstance(datum, Datum):
            raise UnsupportedInput(f"data[{index}] is a {type(datum).__name__}, not a Datum")
    return datums


def as_tensor(name: str, value: Any) -> Any:
    """Convert a caller's loss input to TensorData; a dict parsed from JSON is returned unchanged.

    Raises UnsupportedInput, which names the loss input.
    """
    if isinstance(value, TensorData | dict):
        return value
    dtype = DTYPE_BY_INPUT.get(name)
    if dtype == "float32" and hasattr(value, "tolist"):
        dtype = None  # an array has its own dtype
    try:
        return TensorData.of(value, dtype)
    except UnsupportedInput as refused:
        raise UnsupportedInput(f"loss_fn_inputs.{name}: {refused}") from None


def token_ids(given: Any) -> list[int]:
    """Return the token ids of a tokenizer's output. Raises UnsupportedInput, which names the first invalid one.

    The output may be a list, an array, a tensor, or a `BatchEncoding` with masks. A batch must contain
    exactly one sequence.
    """
    ids: Any = given["input_ids"] if isinstance(given, Mapping) and "input_ids" in given else given
    ids = getattr(ids, "ids", ids)  # an Encoding of the library `tokenizers`
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
    raise UnsupportedInput(cannot_read(chunk))
