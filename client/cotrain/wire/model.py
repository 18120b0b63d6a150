"""What every JSON shape of the wire has in common."""

from __future__ import annotations

import reprlib
import warnings
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cotrain.errors import UnsupportedInput

Name = Annotated[str, Field(min_length=1, max_length=256)]
SeqId = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
"""Place of a request in its run's order; the wire gives it 32 bits."""
ModelSeqId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
"""Number of a run in its session, given by the client."""

Each = TypeVar("Each")
Listed = Annotated[list[Each], Field(fail_fast=True)]
"""A list that is refused at its first wrong element: a million errors take gigabytes and half a minute."""


class WireModel(BaseModel):
    """The wire's own names, and no NaN where it matters."""

    model_config = ConfigDict(
        frozen=True, protected_namespaces=(), allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Argument(WireModel):
    """What a caller makes by hand: a name it does not have is refused, and not passed over.

    `AdamParams(lr=1e-3)` would otherwise train with the default. A reader of the wire does pass
    over what it does not know, a newer client's fields: to read, pydantic calls `__new__` bare.
    """

    _warns_only: ClassVar[bool] = False
    """Where the hosted SDK passes over a name in silence: then it is passed over here with a warning."""

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Raises UnsupportedInput for a name that is no field."""
        unknown = fields.keys() - cls.model_fields.keys()
        if unknown:
            message = f"{cls.__name__} has no {min(unknown)}; it has {', '.join(cls.model_fields)}"
            if not cls._warns_only:
                raise UnsupportedInput(message)
            warnings.warn(f"{message}. It is passed over", stacklevel=2)
        return super().__new__(cls)


class SequencedRequest(WireModel):
    """The part of a training request that says whose it is and where it stands in the order."""

    model_id: Name
    seq_id: SeqId


def in_a_sentence(refused: ValidationError) -> str:
    """Say what is wrong with the first thing that pydantic refused."""
    first = refused.errors(include_url=False)[0]
    where = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
    message = first["msg"].removeprefix("Value error, ").replace("Input", "it", 1)
    return f"{where.lstrip('.')} is {reprlib.repr(first['input'])}: {message}" if where else message
