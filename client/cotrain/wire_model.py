"""What every JSON shape of the wire has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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


class SequencedRequest(WireModel):
    """The part of a training request that says whose it is and where it stands in the order."""

    model_id: Name
    seq_id: SeqId
