"""Redis keys of results: stored results, unread results, and the spool files they occupy.

The module also has the keys of the store's clock and of the keys that it expires.
"""

from __future__ import annotations

from cotrain_store.messages.ids import RequestId, TenantId

#: Lifetime of a small result. A client may sleep overnight and still read its outcome.
SMALL_RESULT_TTL_MS = 24 * 3600 * 1000
#: Lifetime of a result on disk, above the inline limit. Two hours bound the space that an absent
#: client can occupy.
LARGE_RESULT_TTL_MS = 2 * 3600 * 1000
#: Remaining lifetime of a result after its client has certainly read it, for a repeated read.
READ_RESULT_TTL_MS = 300_000
#: Lifetime of a sweep mark. No process resumes a request after being suspended for a month.
SWEPT_TTL_MS = 30 * 24 * 3600 * 1000


def result(request: RequestId) -> str:
    """Return the key of a result; expires (SMALL_RESULT_TTL_MS, LARGE_RESULT_TTL_MS,
    READ_RESULT_TTL_MS; `age_keys`).
    """
    return f"cotrain:result:{request}"


def unread(tenant: TenantId) -> str:
    """Return the key of the hash request → bytes of its result, for results never sent; `bytes` is
    their sum.
    """
    return f"cotrain:tenant:{tenant}:unread"


def unread_until(tenant: TenantId) -> str:
    """Return the key of the sorted set of the results in `unread` (score: expiry, in ms)."""
    return f"cotrain:tenant:{tenant}:unread_until"


def unread_tenants() -> str:
    """Return the key of the sorted set of tenants with unread results (score: their bytes, expired
    results included).
    """
    return "cotrain:tenants:unread"


def spool_segment_refs() -> str:
    """Return the key of the hash spool segment → number of ops with a body in it; a field is
    deleted at 0.
    """
    return "cotrain:spool:refs"


def spool_results() -> str:
    """Return the key of the hash spool segment → number of results in it; a field is deleted at
    0.
    """
    return "cotrain:spool:results"


def spool_swept(writer: str) -> str:
    """Return the key of the highest number of a writer's removed spool segments; expires
    (SWEPT_TTL_MS; `age_keys`).
    """
    return f"cotrain:spool:swept:{writer}"


def notify_results() -> str:
    """Return the channel that carries the request ids of a commit."""
    return "cotrain:notify:results"


def clock() -> str:
    """Return the key of the store's clock, in ms; kept permanently, only increases.

    It started at the time of day. Since then the leading scheduler advances it by a monotonic
    clock.
    """
    return "cotrain:clock"


def ends() -> str:
    """Return the key of the sorted set of expiring keys (score: expiry, by `clock`)."""
    return "cotrain:ends"
