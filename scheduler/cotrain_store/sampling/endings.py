"""How a sample request ends: what the scripts need to know that end one."""

from __future__ import annotations

from cotrain_store.keys import sample_keys
from cotrain_store.messages.results import Result

#: What a request resolves to that its client gave up.
CANCELLED = Result.failed("Cancelled by the client.", "user")
#: What an end needs to know, in ms: how much longer its record lives, and how long it is published.
LIVES = (sample_keys.SAMPLE_RECORD_EXTRA_MS, sample_keys.COMPLETION_TTL_MS)
