"""Results and lifetimes of sample requests that end without an answer.

A module of its own: the scheduler imports it, and must not import the codecs of request bodies with it.
"""

from cotrain_store import redis_keys
from cotrain_store.messages.results import Result

#: Result of a request that its client cancelled.
CANCELLED = Result.failed("Cancelled by the client.", "user")
#: The same as an argument of the scripts.
CANCEL = {
    "result": CANCELLED.encode().decode(),
    "ttl_ms": redis_keys.SMALL_RESULT_TTL_MS,
    "size": len(CANCELLED.payload),
}
#: In ms: the time that the record of an ended request outlives its result, and the time that its end stays published.
TTL_MS = {"record": redis_keys.SAMPLE_RECORD_EXTRA_MS, "published": redis_keys.COMPLETION_TTL_MS}
