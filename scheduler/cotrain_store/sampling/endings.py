"""How a sample request ends: what the scripts need to know that end one, and how its id is read."""

from __future__ import annotations

import re
from typing import NamedTuple

from cotrain_store.keys import sample_keys
from cotrain_store.messages.ids import SamplerId, SessionId
from cotrain_store.messages.results import Result

#: What a request resolves to that its client gave up.
CANCELLED = Result.failed("Cancelled by the client.", "user")
#: A client that was copied (pickled) counts its requests from its own multiple of this.
CLONE_SIZE = 10**9
#: From here on the seqs are the server's own, for requests that came through another API: no client
#: polls for their ends, so nobody is told. A copied client's seqs stay below 10**18.
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


#: What an end needs to know, in ms: how much longer its record lives, and how long it is told.
LIVES = (sample_keys.SAMPLE_RECORD_EXTRA_MS, sample_keys.COMPLETION_TTL_MS)
