"""The keys of results: what they are, who has not read them, and which files they hold.

The keys of time: what it is for the store, and what ends when.
"""

from __future__ import annotations

from cotrain_store.messages.ids import RequestId, TenantId

#: A client may sleep over lunch or overnight and still learn its outcome.
SMALL_RESULT_TTL_MS = 24 * 3600 * 1000
#: Results above the inline limit sit on disk; two hours bound what an absent client can hold.
LARGE_RESULT_TTL_MS = 2 * 3600 * 1000
#: Once its client has certainly read it, a result is kept for no more than a curious second look.
READ_RESULT_TTL_MS = 300_000
#: No process stands still for a month and then goes on with a request: neither its client nor its host is there.
SWEPT_TTL_MS = 30 * 24 * 3600 * 1000


def result(request: RequestId) -> str:
    """Name a result; ends (SMALL_RESULT_TTL_MS, LARGE_RESULT_TTL_MS, READ_RESULT_TTL_MS; `age_keys`)."""
    return f"cotrain:result:{request}"


def unread(tenant: TenantId) -> str:
    """Name the hash request → bytes of its result, of those never sent; `bytes` is their sum."""
    return f"cotrain:tenant:{tenant}:unread"


def unread_until(tenant: TenantId) -> str:
    """Name the sorted set of the results in `unread` (score: when they expire, in ms)."""
    return f"cotrain:tenant:{tenant}:unread_until"


def unread_tenants() -> str:
    """Name the sorted set of tenants with unread results (score: their bytes, also of results that have expired)."""
    return "cotrain:tenants:unread"


def spool_segment_refs() -> str:
    """Name the hash spool segment → ops with a body in it; a field goes when it reaches 0."""
    return "cotrain:spool:refs"


def spool_results() -> str:
    """Name the hash spool segment → results in it; a field goes when it reaches 0."""
    return "cotrain:spool:results"


def spool_swept(writer: str) -> str:
    """Name the highest number of a writer's spool segments that were removed; ends (SWEPT_TTL_MS; `age_keys`)."""
    return f"cotrain:spool:swept:{writer}"


def notify_results() -> str:
    """Name the channel that carries the request ids of a commit."""
    return "cotrain:notify:results"


def clock() -> str:
    """Name the store's clock, in ms; lives permanently, and only grows.

    It began at the time of day. Since then the scheduler that leads counts on a clock that is never set.
    """
    return "cotrain:clock"


def ends() -> str:
    """Name the sorted set of keys that end (score: when, by `clock`)."""
    return "cotrain:ends"
