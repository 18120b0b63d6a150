"""What a sampler is, and what its requests took.

How the id of a sample request is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from cotrain_store.messages.ids import PoolId, SamplerId, SessionId, TenantId, WeightsRef


@dataclass(frozen=True)
class SamplerRecord:
    """One tenant's sampling session. Immutable: it never sees later weights."""

    id: SamplerId
    tenant: TenantId
    session: SessionId
    pool: PoolId
    base_model: str
    model_path: str | None
    """The path it was made from, as the client wrote it."""
    weights: WeightsRef | None
    """None: the base model alone."""
    ephemeral: bool
    """Made by a save without a name: nothing but this sampler refers to its weights."""
    created_at: float


@dataclass(frozen=True)
class SampleUsage:
    """What one sample request took. Of `prompt_tokens`, `cached_tokens` were not computed for it."""

    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int
    device_s: float = 0.0


#: A client that was copied (pickled) counts its requests from its own multiple of this.
CLONE_SIZE = 10**9
#: From here on the seqs are the server's own, for requests that came through another API: no client
#: polls for their ends, so none is published. A copied client's seqs stay below 10**18.
OWN_SEQS = 2**62

_SAMPLE = re.compile(r"([A-Za-z0-9_-]{1,64}:sample:[0-9]{1,20}):([0-9]{1,20})")


class SampleName(NamedTuple):
    """Whose request it is, as its id says it."""

    sampler: SamplerId
    seq: int

    @property
    def clone(self) -> int:
        """Which copy of the client sent it."""
        return self.seq // CLONE_SIZE

    @property
    def session(self) -> SessionId:
        """The session of its sampler."""
        return SessionId(self.sampler.partition(":")[0])


def parse_sample(request: str) -> SampleName | None:
    """Read the id of a sample request; None for what is none."""
    match = _SAMPLE.fullmatch(request)
    return SampleName(SamplerId(match[1]), int(match[2])) if match else None
