"""How a sample request ends: what the scripts need to know that end one."""

from __future__ import annotations

from cotrain_store.keys import result_keys, sample_keys
from cotrain_store.messages.results import Result

#: What a request resolves to that its client gave up.
CANCELLED = Result.failed("Cancelled by the client.", "user")
#: The like, as the scripts take it.
CANCEL = {
    "result": CANCELLED.encode().decode(),
    "ttl_ms": result_keys.SMALL_RESULT_TTL_MS,
    "size": len(CANCELLED.payload),
}
#: In ms: how much longer the record of an ended request lives than its result, and for how long its end
#: is published.
LIVES = {
    "record": sample_keys.SAMPLE_RECORD_EXTRA_MS,
    "published": sample_keys.COMPLETION_TTL_MS,
}
