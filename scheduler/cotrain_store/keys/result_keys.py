"""Redis keys of results: stored results, unread results, and the spool files they occupy.

The module also has the keys of the store's clock and of the keys that it expires.
"""

from collections.abc import Callable

from cotrain_store.messages.ids import RequestId, TenantId

#: Lifetime of a small result. A client may sleep overnight and still read its outcome.
SMALL_RESULT_TTL_MS = 24 * 3600 * 1000
#: Lifetime of a result on disk, above the inline limit. Two hours bound the space that an absent client can occupy.
LARGE_RESULT_TTL_MS = 2 * 3600 * 1000
#: Remaining lifetime of a result after its client has certainly read it, for a repeated read.
READ_RESULT_TTL_MS = 300_000
#: Lifetime of a sweep mark. No process resumes a request after being suspended for a month.
SWEPT_TTL_MS = 30 * 24 * 3600 * 1000

#: Result; expires (SMALL_RESULT_TTL_MS, LARGE_RESULT_TTL_MS, READ_RESULT_TTL_MS; `age_keys`).
result: Callable[[RequestId], str] = "cotrain:result:{}".format
#: Hash request → bytes of its result, for results never sent; `bytes` is their sum.
unread: Callable[[TenantId], str] = "cotrain:tenant:{}:unread".format
#: Sorted set of the results in `unread` (score: expiry, in ms).
unread_until: Callable[[TenantId], str] = "cotrain:tenant:{}:unread_until".format
#: Sorted set of tenants with unread results (score: their bytes, expired results included).
unread_tenants: Callable[[], str] = "cotrain:tenants:unread".format
#: Hash spool segment → number of ops with a body in it; a field is deleted at 0.
spool_segment_refs: Callable[[], str] = "cotrain:spool:refs".format
#: Hash spool segment → number of results in it; a field is deleted at 0.
spool_results: Callable[[], str] = "cotrain:spool:results".format
#: Highest number of a writer's removed spool segments; expires (SWEPT_TTL_MS; `age_keys`).
spool_swept: Callable[[str], str] = "cotrain:spool:swept:{}".format
#: Channel that carries the request ids of a commit.
notify_results: Callable[[], str] = "cotrain:notify:results".format
#: Clock of the store, in ms; kept permanently, only increases.
#: It started at the time of day. Since then the leading scheduler advances it by a monotonic clock.
clock: Callable[[], str] = "cotrain:clock".format
#: Sorted set of expiring keys (score: expiry, by `clock`).
ends: Callable[[], str] = "cotrain:ends".format
