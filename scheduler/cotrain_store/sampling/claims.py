"""A worker's side of sampling: claim sample requests and resolve them.

Plain synchronous and fenced by the worker's epoch, as execution is.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from cotrain_store import redis_keys
from cotrain_store.bodies.sample_body import SampleBody, decode_sample
from cotrain_store.disk.spool import Spool
from cotrain_store.disk.stored_results import CANCEL, TTL_MS, store_results
from cotrain_store.errors import MalformedBody, SpoolCorrupt
from cotrain_store.messages.fleet import WEIGHT
from cotrain_store.messages.ids import PoolId, RequestId, SamplerId, TenantId, WeightsRef, WorkerId
from cotrain_store.messages.ops import Result, ResultKind, SampleUsage
from cotrain_store.redis_client.connection import SyncConnection
from cotrain_store.redis_client.scripts import sync_script, worker_args
from cotrain_store.usage import minute_of, sample_counts, sampling_amounts, usage_hour


@dataclass(frozen=True)
class ClaimedSample:
    """One sample request that this worker runs now."""

    request: RequestId
    tenant: TenantId
    sampler: SamplerId
    weights: WeightsRef | None  # None for the base model alone
    body: SampleBody | None  # None if it is missing or cannot be read
    accepted_at: float
    starts: int  # number of processes that crashed after they claimed it
    deaths: int  # number of processes that crashed while they ran only this request (`risk`)
    tenant_weight: float = WEIGHT  # weight of the tenant at the time of the claim
    trace: str = ""  # span of its request, as a `traceparent`, if the request is traced


class SampleClaims:
    """Access of one worker to the sample requests of its pool.

    Methods that write raise Fenced if another process took over this worker id.
    """

    def __init__(
        self, connection: SyncConnection, spool: Spool, results: Spool, pool: PoolId, worker: WorkerId, epoch: int
    ) -> None:
        self._redis = connection
        self._spool = spool
        self._results = results
        self._pool = pool
        self._worker = worker
        self._own = worker_args(pool, worker, epoch)
        self._claim_token = secrets.token_hex(8)
        self._claim = sync_script(connection, "sample_claim")
        self._requeue = sync_script(connection, "sample_requeue")
        self._resolve = sync_script(connection, "sample_resolve")

    def requeue(self) -> int:
        """Return the requests of a crashed predecessor to the front, in order, and count a crash of
        each; called at start.
        """
        return self._put_back(crashes=1)

    def give_back(self) -> int:
        """Return the requests of this process to the front, without counting a crash; called at the end."""
        return self._put_back(crashes=0)

    def claim(
        self,
        max_requests: int,
        max_of_tenant: int | None = None,
        waiting: Mapping[TenantId, int] = MappingProxyType({}),
    ) -> list[ClaimedSample]:
        """Claim waiting requests, one per tenant in turn; within a tenant, first those that only this worker can run.

        A tenant gets at most `max_of_tenant` requests, including those that `waiting` counts for it. After a lost
        connection, or an OSError, the next call returns the same requests again.
        """
        args = {
            **self._own, "any_worker": redis_keys.ANY_WORKER, "most": max_requests, "token": self._claim_token,
            "max_of_tenant": max_requests if max_of_tenant is None else max_of_tenant,
            "waiting": dict(waiting),
        }  # fmt: skip
        rows = self._claim(args)
        claimed = [self._claimed(row) for row in rows]
        # Only now, so that requests that could not be read are returned again.
        self._claim_token = secrets.token_hex(8)
        return claimed

    def risk(self, request: RequestId) -> None:
        """Count a crash during this claimed request in advance, because the process may not survive it."""
        self._redis.hincrby(redis_keys.sample(request), "deaths", 1)

    def resolve(
        self,
        results: Mapping[RequestId, Result],
        counted: Mapping[str, float],
        usage: Mapping[RequestId, SampleUsage] | None = None,
    ) -> None:
        """Make results visible, release the resources of the requests, notify their clients.

        The first result of each request wins. The counts in `counted` are added to the pool's totals unless no result
        was new. A repeated call therefore changes nothing. The amounts in `usage` are added to the tenants' usage.
        """

        def resolve(encoded: Sequence[tuple[bytes, int]]) -> bytes:
            ended = [
                {
                    "request": request, "ttl_ms": ttl_ms, "result_bytes": len(result.payload),
                    "failed": int(result.kind is ResultKind.FAILURE),
                    "counts": sample_counts((usage or {}).get(request)),
                    "used": sampling_amounts(request, (usage or {}).get(request), self._base_model),
                }
                for (request, result), (_, ttl_ms) in zip(results.items(), encoded, strict=True)
            ]  # fmt: skip
            args = {
                **self._own, "requests": ended, "counted": dict(counted), "lives": TTL_MS,
                "hour": usage_hour(time.time()), "usage_ttl_s": redis_keys.USAGE_TTL_S,
                "minute": redis_keys.minute(self._pool, minute_of(time.time())),
                "minute_ttl_s": redis_keys.MINUTE_TTL_S,
            }  # fmt: skip
            answer: bytes = self._resolve(args, *(value for value, _ in encoded))
            return answer

        store_results(list(results.values()), self._results, resolve)

    @cached_property
    def _base_model(self) -> str:
        row = self._redis.hget(redis_keys.pools(), self._pool)
        return str(json.loads(row)["base_model"])

    def cancelled(self) -> list[RequestId]:
        """Return this worker's requests that their clients cancelled; resolve each with CANCELLED."""
        members = self._redis.smembers(redis_keys.cancelled_samples(self._pool, self._worker))
        return sorted(RequestId(member.decode()) for member in members)

    def _put_back(self, *, crashes: int) -> int:
        args = {**self._own, "crashes": crashes, "cancel": CANCEL, "lives": TTL_MS}
        return int(self._requeue(args))

    def _claimed(self, row: Sequence[bytes | None]) -> ClaimedSample:
        request, tenant, sampler, weights, ref, at = ((row[column] or b"").decode() for column in (0, 1, 2, 3, 4, 6))
        return ClaimedSample(
            request=RequestId(request),
            tenant=TenantId(tenant),
            sampler=SamplerId(sampler),
            weights=WeightsRef(weights) if weights else None,
            body=self._body(ref, row[5]),
            accepted_at=float(at),
            starts=int(row[7] or 0),
            deaths=int(row[8] or 0),
            trace=(row[9] or b"").decode(),
            tenant_weight=float(row[10] or WEIGHT),
        )

    def _body(self, ref: str, inline: bytes | None) -> SampleBody | None:
        try:
            content = inline if ref == "inline" else self._spool.read(ref)
            return decode_sample(content) if content is not None else None
        except (SpoolCorrupt, MalformedBody):
            return None
