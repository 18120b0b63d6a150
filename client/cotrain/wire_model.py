"""What every JSON shape of the wire has in common."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from cotrain.errors import UnsupportedInput

Name = Annotated[str, Field(min_length=1, max_length=256)]
SeqId = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
"""Place of a request in its run's order; the wire gives it 32 bits."""
ModelSeqId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
"""Number of a run in its session, given by the client."""


class WireModel(BaseModel):
    """The wire's own names, and no NaN where it matters."""

    model_config = ConfigDict(
        frozen=True, protected_namespaces=(), allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Argument(WireModel):
    """What a caller makes by hand: a name it does not have is refused, and not passed over.

    `AdamParams(lr=1e-3)` would otherwise train with the default. Whoever reads the wire does pass
    over what it does not know, a newer client's fields: to read, pydantic calls `__new__` bare.
    """

    def __new__(cls, *_: Any, **fields: Any) -> Self:
        """Raises UnsupportedInput for a name that is no field."""
        unknown = fields.keys() - cls.model_fields.keys()
        if unknown:
            known = ", ".join(cls.model_fields)
            raise UnsupportedInput(f"{cls.__name__} has no {min(unknown)}; it has {known}")
        return super().__new__(cls)


class SequencedRequest(WireModel):
    """The part of a training request that says whose it is and where it stands in the order."""

    model_id: Name
    seq_id: SeqId
