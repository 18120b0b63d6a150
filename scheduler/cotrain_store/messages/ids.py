"""What everything is called. Ids are strings that a client sees; some say what they belong to.

How a message is written as JSON and read again, in the next version as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NewType, TypeAlias, TypeVar

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
RequestId = NewType("RequestId", str)
PoolId = NewType("PoolId", str)
WorkerId = NewType("WorkerId", str)
SamplerId = NewType("SamplerId", str)
#: Weights are named by the save that made them: `<run>:<seq>`, its request id.
WeightsRef = NewType("WeightsRef", str)
#: An op by its run and its position in the run's order.
OpId: TypeAlias = tuple[RunId, int]


def request_id(run: RunId, seq: int) -> RequestId:
    """Name the request with this place in its run's order."""
    return RequestId(f"{run}:{seq}")


def run_of(request: RequestId) -> RunId:
    """Name the run a request id belongs to; the inverse of `request_id`."""
    return RunId(request.rpartition(":")[0])


def seq_of(request: RequestId | WeightsRef) -> int:
    """Name the place in its run's order that a request id, or weights made by one, belong to."""
    return int(request.rpartition(":")[2])


def run_id(session: SessionId, model_seq_id: int) -> RunId:
    """Name a run the way SDK 0.38 hard-codes it for runs made by loading a checkpoint."""
    return RunId(f"{session}:train:{model_seq_id}")


def session_of(run: RunId) -> SessionId:
    """Name the session of a run; the inverse of `run_id`."""
    return SessionId(run.partition(":")[0])


def sampler_id(session: SessionId, sampling_seq_id: int) -> SamplerId:
    """Name the sampler that a client made as its n-th."""
    return SamplerId(f"{session}:sample:{sampling_seq_id}")


def sample_id(sampler: SamplerId, seq: int) -> RequestId:
    """Name a sample request by its sampler and the number its client gave it (64 bits)."""
    return RequestId(f"{sampler}:{seq}")


_Message = TypeVar("_Message")


def encode(record: Any) -> str:
    """Write a dataclass of this package as compact JSON.

    Half a surrogate pair, which a tenant's text may hold, is no Unicode: the scripts could not read it.
    """
    text = json.dumps(asdict(record), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def decode(message: type[_Message], raw: Mapping[str, Any]) -> _Message:
    """Build a message of what `encode` wrote, in this version or the next: unknown fields are dropped."""
    known = {field.name for field in fields(message)}  # type: ignore[arg-type]  # always a dataclass
    return message(**{name: value for name, value in raw.items() if name in known})
