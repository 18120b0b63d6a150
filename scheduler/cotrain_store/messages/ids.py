"""Types and formats of ids, and the JSON encoding of messages.

Ids are strings that a client sees; some contain the id of their parent. Messages stay readable by the next version.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple, NewType, TypeAlias, TypeVar

TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
RequestId = NewType("RequestId", str)
PoolId = NewType("PoolId", str)
WorkerId = NewType("WorkerId", str)
SamplerId = NewType("SamplerId", str)
#: Id of weights, `<run>:<seq>`: the request id of the save that made them.
WeightsRef = NewType("WeightsRef", str)
#: Run and position in the run's order.
OpId: TypeAlias = tuple[str, int]

#: Size of the range of seqs of each copy of a client. A copied (pickled) client counts from its own multiple of this.
CLONE_SIZE = 10**9
#: First seq of the server's own requests, which came through another API. No client polls for their
#: completion, so none is published. A copied client's seqs stay below 10**18.
OWN_SEQS = 2**62

_SAMPLE = re.compile(r"([A-Za-z0-9_-]{1,64}:sample:[0-9]{1,20}):([0-9]{1,20})")


def request_id(run: RunId, seq: int) -> RequestId:
    """Return the id of the request at this position in its run's order."""
    return RequestId(f"{run}:{seq}")


def run_of(request: RequestId) -> RunId:
    """Return the run of a request id; the inverse of `request_id`."""
    return RunId(request.rpartition(":")[0])


def seq_of(request: RequestId | WeightsRef) -> int:
    """Return the seq in a request id, or in a reference to weights made by one."""
    return int(request.rpartition(":")[2])


def run_id(session: SessionId, model_seq_id: int) -> RunId:
    """Return the id of a run, in the format that SDK 0.38 hard-codes for runs made by loading a checkpoint."""
    return RunId(f"{session}:train:{model_seq_id}")


def session_of(run: RunId) -> SessionId:
    """Return the session of a run; the inverse of `run_id`."""
    return SessionId(run.partition(":")[0])


def sampler_id(session: SessionId, sampling_seq_id: int) -> SamplerId:
    """Return the id of a client's n-th sampler."""
    return SamplerId(f"{session}:sample:{sampling_seq_id}")


def sample_id(sampler: SamplerId, seq: int) -> RequestId:
    """Return the id of a sample request from its sampler and the number its client assigned (64 bits)."""
    return RequestId(f"{sampler}:{seq}")


class SampleName(NamedTuple):
    """Sampler and seq in the id of a sample request."""

    sampler: SamplerId
    seq: int

    @property
    def clone(self) -> int:
        """Number of the copy of the client that sent it."""
        return self.seq // CLONE_SIZE

    @property
    def session(self) -> SessionId:
        """Session of its sampler."""
        return SessionId(self.sampler.partition(":")[0])


def parse_sample(request: str) -> SampleName | None:
    """Return the parts of a sample request's id, or None for any other string."""
    match = _SAMPLE.fullmatch(request)
    return SampleName(SamplerId(match[1]), int(match[2])) if match else None


_Message = TypeVar("_Message")


def encode(record: Any) -> str:
    """Return a dataclass of this package as compact JSON.

    Half a surrogate pair in a tenant's text is replaced: it is not valid Unicode, and the scripts could not read it.
    """
    text = json.dumps(asdict(record), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def decode(message: type[_Message], raw: Mapping[str, Any]) -> _Message:
    """Return the message that `encode` wrote, in this version or the next. Unknown fields are dropped."""
    known = {field.name for field in fields(message)}  # type: ignore[arg-type]  # always a dataclass
    return message(**{name: value for name, value in raw.items() if name in known})
