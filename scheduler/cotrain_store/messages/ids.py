"""What everything is called. Ids are strings that a client sees; some say what they belong to."""

from __future__ import annotations

from typing import NewType, TypeAlias

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
