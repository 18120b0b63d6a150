"""Claim sample requests, resolve them, keep the weights they need: a worker's side of sampling.

Plain synchronous and fenced by the worker's epoch, as execution is.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cotrain_store.connection import sync_script
from cotrain_store.errors import Fenced, MalformedBody, SpoolCorrupt
from cotrain_store.keys import fleet_keys, result_keys, sample_keys, tenant_keys, weights_keys
from cotrain_store.messages.encoding import decode, encode
from cotrain_store.messages.ids import RequestId, SamplerId, TenantId, WeightsRef, run_of
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.weights import CheckpointRecord, external_folder
from cotrain_store.record_rows import WEIGHTS_FIELDS, weights_record
from cotrain_store.results import UNLOADED, pack_results
from cotrain_store.sample_ends import CANCELLED, lives
from cotrain_store.samples import decode_sample
from cotrain_store.usage_fields import sampling_amounts, usage_field, usage_hour

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.connection import SyncConnection
    from cotrain_store.messages.ids import PoolId, WorkerId
    from cotrain_store.messages.samples import SampleUsage
    from cotrain_store.messages.weights import WeightsRecord
    from cotrain_store.samples import SampleBody
    from cotrain_store.spool import Spool


#: Redis does nothing else while it looks at these: about 20 µs for each.
WEIGHTS_AT_ONCE = 250


@dataclass(frozen=True)
class ClaimedSample:
    """One sample request that this worker runs now."""

    request: RequestId
    tenant: TenantId
    sampler: SamplerId
    weights: WeightsRef | None
    """None: the base model alone."""
    body: SampleBody | None
    """None: it is gone or cannot be read."""
    accepted_at: float
    starts: int
    """How many processes died while they held it."""
    deaths: int
    """How many processes died over it alone (`risk`)."""


class Sampling:
    """One worker's access to the sample requests and the sampler weights of its pool.

    What writes raises Fenced when another process took this worker's place.
    """

    def __init__(
        self,
        connection: SyncConnection,
        spool: Spool,
        results: Spool,
        pool: PoolId,
        worker: WorkerId,
        epoch: int,
    ) -> None:
        self._redis = connection
        self._spool = spool
        self._results = results
        self._pool = pool
        self._worker = worker
        self._epoch = epoch
        self._epoch_key = fleet_keys.worker_epoch(pool, worker)
        self._claim_token = secrets.token_hex(8)
        self._claim = sync_script(connection, "sample_claim")
        self._requeue = sync_script(
            connection, "sample_finish", "sample_put_back", "sample_requeue"
        )
        self._resolve = sync_script(
            connection, "unread", "usage_add", "sample_finish", "sample_resolve"
        )
        ends = ("checkpoint_index", "run_close", "save_end")
        self._stored = sync_script(connection, "usage_add", *ends, "weights_stored")
        self._lost = sync_script(connection, *ends, "weights_lost")
        self._list_unused = sync_script(connection, "weights_in_use", "weights_unused")
        self._forget = sync_script(connection, "weights_in_use", "weights_forget")

    def requeue(self) -> int:
        """At enter: put what a dead predecessor ran back at the front, in order; count it."""
        return self._put_back(deaths=1)

    def give_back(self) -> int:
        """At leave: put what this process runs back at the front; no death is counted."""
        return self._put_back(deaths=0)

    def claim(self, most: int) -> list[ClaimedSample]:
        """Take waiting requests, one per tenant in turn; of a tenant's, those first that only this
        worker can run. After a lost connection, or an OSError, the next call gives the same again.
        """
        pool, me = self._pool, self._worker
        script_keys = [
            self._epoch_key, sample_keys.sample_ring(pool), sample_keys.claimed_samples(pool, me),
            fleet_keys.workers(pool), sample_keys.last_claim(pool, me),
        ]  # fmt: skip
        args = [
            self._epoch,
            fleet_keys.prefix(pool),
            me,
            sample_keys.ANY_LANE,
            most,
            self._claim_token,
        ]
        rows = self._claim(script_keys, args)
        if rows == b"FENCED":
            raise Fenced
        claimed = [self._claimed(row) for row in rows]
        self._claim_token = secrets.token_hex(8)  # only now: what cannot be read comes again
        return claimed

    def risk(self, request: RequestId) -> None:
        """Count a death over this claimed request in advance: nobody may be left to do it after."""
        self._redis.hincrby(sample_keys.sample(request), "deaths", 1)

    def resolve(
        self,
        results: Mapping[RequestId, Result],
        counted: Mapping[str, float],
        usage: Mapping[RequestId, SampleUsage] | None = None,
    ) -> None:
        """Make results visible, free what the requests held, tell their clients.

        The first result of each wins. `counted` is added to the pool's totals, unless none did: so
        twice is harmless. `usage` is added to what their tenants used.
        """
        script_keys = [
            self._epoch_key, result_keys.spool_segment_refs(), result_keys.notify_results(),
            fleet_keys.counters(self._pool),
        ]  # fmt: skip
        now = time.time()
        args: list[str | int | bytes] = [
            self._epoch, json.dumps(counted), *lives(now), usage_hour(now), tenant_keys.USAGE_TTL_S,
        ]  # fmt: skip
        all_packed = pack_results(list(results.values()), self._results)
        for (request, result), (packed, ttl_ms) in zip(results.items(), all_packed, strict=True):
            failed = int(result.kind is ResultKind.FAILURE)
            used = sampling_amounts(request, (usage or {}).get(request), self._base_model)
            args += [request, packed, ttl_ms, failed, len(result.payload), json.dumps(used)]
        if self._resolve(script_keys, args) == b"FENCED":
            raise Fenced

    @cached_property
    def _base_model(self) -> str:
        row = self._redis.hget(fleet_keys.pools(), self._pool)
        return str(json.loads(row)["base_model"])

    def cancelled(self) -> list[RequestId]:
        """List this worker's requests that their clients gave up; each is to be resolved, CANCELLED."""
        members = self._redis.smembers(sample_keys.cancelled_samples(self._pool, self._worker))
        return sorted(RequestId(member.decode()) for member in members)

    def depth(self) -> int:
        """Count the requests that wait in this pool, whoever may run them."""
        pipeline = self._redis.pipeline(transaction=False)
        for tenant in self._redis.lrange(sample_keys.sample_ring(self._pool), 0, -1):
            pipeline.hget(sample_keys.sample_load(self._pool, TenantId(tenant.decode())), "waiting")
        return sum(int(waiting or 0) for waiting in pipeline.execute())

    def weights(self, ref: WeightsRef) -> WeightsRecord | None:
        """Read what is known of sampler weights; None once they are forgotten."""
        row = self._redis.hmget(weights_keys.weights(ref), WEIGHTS_FIELDS)
        return weights_record(row) if row[0] else None

    def unstored(self) -> list[WeightsRecord]:
        """List the weights that nobody but this worker has; after a crash, nobody: a replay of the
        log makes them again.
        """
        members = self._redis.smembers(weights_keys.unstored_weights(self._pool, self._worker))
        found = [self.weights(WeightsRef(member.decode())) for member in members]
        return sorted((w for w in found if w), key=lambda weights: weights.created_at)

    def stored(self, ref: WeightsRef, digest: str, size: int, optimizer_digest: str = "") -> bool:
        """Note that all files of weights are durable, `size` bytes together.

        What a named save owed appears with it: its checkpoint, its result, the end of its run if it
        was the last one. False when there are no such weights: forgotten, lost, or their save was
        refused because its name was in use. The first digest stays.
        """
        pool, now = self._pool, time.time()
        checkpoint, result = self._owed(ref, size)
        tenant = checkpoint.tenant if checkpoint else TenantId("")
        script_keys = [
            self._epoch_key, weights_keys.weights(ref), weights_keys.content(pool, digest),
            weights_keys.unstored_weights(pool, self._worker),
            weights_keys.optimizer_content(pool, optimizer_digest), result_keys.notify_results(),
            tenant_keys.usage(tenant, usage_hour(now)),
        ]  # fmt: skip
        args = [
            self._epoch, ref, digest, size, optimizer_digest, fleet_keys.prefix(pool),
            encode(checkpoint) if checkpoint else "", result, UNLOADED.pack(),
            usage_field("checkpoints", self._base_model, run_of(RequestId(ref))),
            tenant_keys.USAGE_TTL_S,
        ]  # fmt: skip
        answer = self._stored(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"OK")

    def _owed(self, ref: WeightsRef, size: int) -> tuple[CheckpointRecord | None, bytes]:
        """Read what a named save owes: its checkpoint and result, now that its size is known.

        Nobody but this worker changes them; a script that finds them gone asks for neither.
        """
        text, packed = self._redis.hmget(weights_keys.weights(ref), ["checkpoint", "result"])
        if text is None:
            return None, b""
        checkpoint = replace(decode(CheckpointRecord, json.loads(text)), size=size)
        result = Result.unpack(packed)
        if checkpoint.kind == "external_weights" and result.kind is ResultKind.JSON:
            result = Result.of_json({**result.json(), "size_bytes": size})
        return checkpoint, result.pack()

    def lost(self, ref: WeightsRef, message: str) -> None:
        """Give up a named save that nothing can make again: it fails, category server.

        Its name is free again. Nothing happens to weights that are stored, and to those of a sampler.
        """
        pool = self._pool
        script_keys = [
            self._epoch_key, weights_keys.weights(ref), result_keys.notify_results(),
            weights_keys.unstored_weights(pool, self._worker), weights_keys.pool_weights(pool),
            weights_keys.external_folders(pool), weights_keys.weights_users(ref),
        ]  # fmt: skip
        args = [
            self._epoch, ref, fleet_keys.prefix(pool), Result.failed(message, "server").pack(),
            result_keys.SMALL_RESULT_TTL_MS, UNLOADED.pack(), external_folder(ref),
        ]  # fmt: skip
        if self._lost(script_keys, args) == b"FENCED":
            raise Fenced

    def unused_weights(self) -> list[WeightsRecord]:
        """List the stored weights of this pool that no checkpoint, living sampler or load refers to."""
        refs = sorted(self._redis.smembers(weights_keys.pool_weights(self._pool)))
        unused: list[list[bytes]] = []
        for start in range(0, len(refs), WEIGHTS_AT_ONCE):
            unused += self._list_unused([], refs[start : start + WEIGHTS_AT_ONCE])
        return [weights_record(row) for row in unused]

    def forget_weights(self, ref: WeightsRef) -> bool:
        """Forget weights unless they are in use again; True when nothing else has their content.

        Then their folder may go, but not at once: another worker may have found it and be about to
        call `stored`.
        """
        pool = self._pool
        script_keys = [
            self._epoch_key, weights_keys.weights(ref), weights_keys.weights_users(ref),
            weights_keys.pool_weights(pool), weights_keys.external_folders(pool),
        ]  # fmt: skip
        args = [self._epoch, fleet_keys.prefix(pool), ref, external_folder(ref)]
        answer = self._forget(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"LAST")

    def knows(self, digest: str) -> bool:
        """Tell whether some weights have this content: a folder without is a leftover."""
        return bool(self._redis.exists(weights_keys.content(self._pool, digest)))

    def knows_optimizer(self, digest: str) -> bool:
        """Tell whether some weights have this optimizer state: a file without is a leftover."""
        return bool(self._redis.exists(weights_keys.optimizer_content(self._pool, digest)))

    def knows_external(self, folder: str) -> bool:
        """Tell whether some weights have this folder (`external_folder`) of encrypted files."""
        return bool(self._redis.sismember(weights_keys.external_folders(self._pool), folder))

    def _put_back(self, *, deaths: int) -> int:
        script_keys = [
            self._epoch_key,
            result_keys.spool_segment_refs(),
            result_keys.notify_results(),
        ]
        args = [
            self._epoch, fleet_keys.prefix(self._pool), self._worker, deaths, CANCELLED.pack(),
            result_keys.SMALL_RESULT_TTL_MS, len(CANCELLED.payload), *lives(time.time()),
        ]  # fmt: skip
        count = self._requeue(script_keys, args)
        if count == b"FENCED":
            raise Fenced
        return int(count)

    def _claimed(self, row: Sequence[bytes | None]) -> ClaimedSample:
        request, tenant, sampler, weights, ref, at = (
            (row[column] or b"").decode() for column in (0, 1, 2, 3, 4, 6)
        )
        return ClaimedSample(
            request=RequestId(request),
            tenant=TenantId(tenant),
            sampler=SamplerId(sampler),
            weights=WeightsRef(weights) if weights else None,
            body=self._body(ref, row[5]),
            accepted_at=float(at),
            starts=int(row[7] or 0),
            deaths=int(row[8] or 0),
        )

    def _body(self, ref: str, inline: bytes | None) -> SampleBody | None:
        try:
            content = inline if ref == "inline" else self._spool.read(ref)
            return decode_sample(content) if content is not None else None
        except (SpoolCorrupt, MalformedBody):
            return None
