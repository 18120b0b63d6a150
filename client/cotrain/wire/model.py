"""Base classes and field types of all JSON messages."""

import reprlib
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import override

from cotrain.errors import UnsupportedInput

__all__ = ["SeqId", "SequencedRequest"]

Name = Annotated[str, Field(min_length=1, max_length=256)]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
"""A `tinker://` path, or the name of a base model where that is allowed."""
Seconds = Annotated[int, Field(ge=1, lt=2**40)]
"""Time until a checkpoint expires."""
SeqId = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
"""Position of a request in its run's order; 32 bits on the wire."""
ModelSeqId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
"""Number of a run in its session, assigned by the client."""

Each = TypeVar("Each")
Listed = Annotated[list[Each], Field(fail_fast=True)]
"""List that is rejected at its first invalid element: a million errors take gigabytes and half a minute."""


MAX_SHOWN = 8
"""Maximum number of elements in the representation of a list or mapping; a longer one shows their number."""


class _Elements(int):
    """Number of elements, shown in place of a long list or mapping."""

    @override
    def __repr__(self) -> str:
        return f"<{self:d} elements>"


class OneLine(BaseModel):
    """Base of all messages and data: a representation takes one line, whatever its size. It omits empty fields."""

    @override
    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            if isinstance(value, list | dict) and len(value) > MAX_SHOWN:
                yield name, _Elements(len(value))
            elif value is not None:
                yield name, value


class WireModel(OneLine):
    """Base of all messages: field names of the wire, immutable, without NaN except where a field allows it."""

    model_config = ConfigDict(frozen=True, protected_namespaces=(), allow_inf_nan=False, ser_json_inf_nan="constants")


class Argument(WireModel):
    """Message that callers construct. An unknown field is rejected instead of ignored.

    `AdamParams(lr=1e-3)` would otherwise train with the default. Parsers of the wire do ignore unknown
    fields, which a newer client may send: pydantic then calls `__new__` without fields.
    """

    _warns_only: ClassVar[bool] = False
    """True where the hosted SDK ignores unknown names silently: then this class ignores them with a warning."""

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Raise UnsupportedInput for an unknown field name."""
        unknown = fields.keys() - cls.model_fields.keys()
        if unknown:
            message = f"{cls.__name__} has no {min(unknown)}; it has {', '.join(cls.model_fields)}"
            if not cls._warns_only:
                raise UnsupportedInput(message)
            warnings.warn(f"{message}. It is passed over", stacklevel=2)
        return super().__new__(cls)


class SequencedRequest(WireModel):
    """Fields of every training request: its run, and its position in the run's order."""

    model_id: Name
    seq_id: SeqId


def in_a_sentence(refused: ValidationError) -> str:
    """Return one sentence about the first error of a pydantic validation."""
    first = refused.errors(include_url=False)[0]
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    message = first["msg"].removeprefix("Value error, ").replace("Input", "it", 1)
    return f"{where.lstrip('.')} is {reprlib.repr(first['input'])}: {message}" if where else message
