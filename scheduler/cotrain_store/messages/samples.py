"""Records of samplers, usage of sample requests, and the parser of their ids."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from cotrain_store.messages.ids import PoolId, SamplerId, SessionId, TenantId, WeightsRef


@dataclass(frozen=True)
class SamplerRecord:
    """Sampling session of one tenant. Immutable: later training does not change it."""

    id: SamplerId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    model_path: str | None  # path that it was made from, as the client wrote it
    weights: WeightsRef | None  # None for the base model alone
    ephemeral: bool
    """True if a save without a name made it: only this sampler refers to its weights."""
    created_at: float
    step: int | None = None
    """Optimizer steps of the weights' run before they were saved; None for the base model, and if not known."""


@dataclass(frozen=True)
class SampleUsage:
    """Usage of one sample request. `cached_tokens` is the part of `prompt_tokens` that was not computed for it."""

    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    device_s: float = 0.0


#: Size of the range of seqs of each copy of a client. A copied (pickled) client counts from its own multiple of this.
CLONE_SIZE = 10**9
#: First seq of the server's own requests, which came through another API. No client polls for their
#: completion, so none is published. A copied client's seqs stay below 10**18.
OWN_SEQS = 2**62

_SAMPLE = re.compile(r"([A-Za-z0-9_-]{1,64}:sample:[0-9]{1,20}):([0-9]{1,20})")


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
