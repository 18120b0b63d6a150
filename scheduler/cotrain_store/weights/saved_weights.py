"""What is known of saved weights, from the save to their last user: a worker's side of them.

Plain synchronous and fenced by the worker's epoch, as execution is.

Of all workers that could remove what nothing refers to from an object store, one does.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from functools import cached_property

from cotrain_store.disk.result_storage import UNLOADED
from cotrain_store.errors import Fenced
from cotrain_store.keys import fleet_keys, result_keys, tenant_keys, weights_keys
from cotrain_store.keys.tenant_keys import usage_field, usage_hour
from cotrain_store.messages.ids import (
    PoolId,
    RequestId,
    TenantId,
    WeightsRef,
    WorkerId,
    decode,
    encode,
    run_of,
)
from cotrain_store.messages.ops import WEIGHTS_FIELDS, weights_record
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.saves import CheckpointRecord, WeightsRecord, external_folder
from cotrain_store.redis_client.connection import SyncConnection
from cotrain_store.redis_client.scripts import sync_script

LEASE_MS = 60_000
_RENEW_S = 20.0


class SweepLease:
    """The right to sweep what `key` stands for. Two that hold it at once only look twice."""

    def __init__(self, connection: SyncConnection, key: str, holder: str) -> None:
        self._redis = connection
        self._key = key
        self._holder = holder
        self._is_mine = False
        self._ask_at = -math.inf

    def is_mine(self, now: float) -> bool:
        """Take it, keep it, or tell that another worker has it; `now` is of the monotonic clock, in s."""
        if now >= self._ask_at:
            self._ask_at = now + _RENEW_S
            taken = self._redis.set(self._key, self._holder, nx=True, px=LEASE_MS)
            self._is_mine = bool(taken) or self._redis.get(self._key) == self._holder.encode()
            if self._is_mine and not taken:
                self._redis.pexpire(self._key, LEASE_MS)
        return self._is_mine


#: Redis does nothing else while it looks at these: about 20 µs for each.
WEIGHTS_AT_ONCE = 250
#: So often at most, of weights that something has ceased to refer to, in one sweep.
LOOKS = 8
#: What is in use for a while is looked at again after so long.
LOOK_AGAIN_MS = 3600 * 1000


class SavedWeights:
    """One worker's access to the weights of its pool.

    What writes raises Fenced when another process took this worker's place.
    """

    def __init__(
        self, connection: SyncConnection, pool: PoolId, worker: WorkerId, epoch: int
    ) -> None:
        self._redis = connection
        self._pool = pool
        self._worker = worker
        self._epoch = epoch
        self._cursor = 0
        self._epoch_key = fleet_keys.worker_epoch(pool, worker)
        self._stored = sync_script(connection, "weights_stored")
        self._lost = sync_script(connection, "weights_lost")
        self._list_unused = sync_script(connection, "weights_unused")
        self._forget = sync_script(connection, "weights_forget")

    def weights(self, ref: WeightsRef) -> WeightsRecord | None:
        """Read what is known of sampler weights; None once they are forgotten."""
        row = self._redis.hmget(weights_keys.weights(ref), WEIGHTS_FIELDS)
        return weights_record(row) if row[0] else None

    def unstored(self) -> list[WeightsRecord]:
        """List the weights that this worker alone has; after a crash no worker has them: a replay of
        the log makes them again.
        """
        members = self._redis.smembers(weights_keys.unstored_weights(self._pool, self._worker))
        found = [self.weights(WeightsRef(member.decode())) for member in members]
        return sorted((w for w in found if w), key=lambda weights: weights.created_at)

    def stored(self, ref: WeightsRef, digest: str, size: int, optimizer_digest: str = "") -> bool:
        """Note that all files of weights are durable, `size` bytes together.

        What a named save held back appears with it: its checkpoint, its result, the end of its run if it
        was the last one. False when there are no such weights: forgotten, lost, or their save was
        refused because its name was in use. The first digest stays.
        """
        pool, now = self._pool, time.time()
        checkpoint, result = self._kept_back(ref, size)
        tenant = checkpoint.tenant if checkpoint else TenantId("")
        script_keys = [
            self._epoch_key, weights_keys.weights(ref), weights_keys.weights_users(ref),
            weights_keys.content(pool, digest),
            weights_keys.unstored_weights(pool, self._worker),
            weights_keys.optimizer_content(pool, optimizer_digest), result_keys.notify_results(),
            tenant_keys.usage(tenant, usage_hour(now)),
        ]  # fmt: skip
        args = {
            "epoch": str(self._epoch), "ref": ref, "digest": digest, "size": size,
            "optimizer": optimizer_digest, "prefix": fleet_keys.prefix(pool),
            "checkpoint": encode(checkpoint) if checkpoint else "",
            "closing": UNLOADED.encode().decode(),
            "used": usage_field("checkpoints", self._base_model, run_of(RequestId(ref))),
            "usage_ttl_s": tenant_keys.USAGE_TTL_S,
        }  # fmt: skip
        answer = self._stored(script_keys, args, result)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"OK")

    def _kept_back(self, ref: WeightsRef, size: int) -> tuple[CheckpointRecord | None, bytes]:
        """Read what a named save holds back: its checkpoint and result, now that its size is known.

        This worker alone changes them; a script that finds them deleted reads neither.
        """
        text, value = self._redis.hmget(weights_keys.weights(ref), ["checkpoint", "result"])
        if text is None:
            return None, b""
        checkpoint = replace(decode(CheckpointRecord, json.loads(text)), size=size)
        result = Result.decode(value)
        if checkpoint.kind == "external_weights" and result.kind is ResultKind.JSON:
            result = Result.of_json({**result.json(), "size_bytes": size})
        return checkpoint, result.encode()

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
        args = {
            "epoch": str(self._epoch), "ref": ref, "prefix": fleet_keys.prefix(pool),
            "result": Result.failed(message, "server").encode().decode(),
            "ttl_ms": result_keys.SMALL_RESULT_TTL_MS, "closing": UNLOADED.encode().decode(),
            "folder": external_folder(ref),
        }  # fmt: skip
        if self._lost(script_keys, args) == b"FENCED":
            raise Fenced

    def unused_weights(self) -> list[WeightsRecord]:
        """List stored weights of this pool that no checkpoint, living sampler or load refers to.

        Checks weights that lost a reference since the last call, and a few of all, so that each has its
        turn. The cost does not grow with their number.
        """
        self._cursor, some = self._redis.sscan(
            weights_keys.pool_weights(self._pool), self._cursor, count=WEIGHTS_AT_ONCE
        )
        rows: dict[bytes, list[bytes]] = {}
        refs = [ref.decode() for ref in some]
        for _ in range(LOOKS):
            looked, *unused = self._list_unused(
                [weights_keys.released_weights(self._pool)],
                {"refs": refs, "most": WEIGHTS_AT_ONCE, "again_ms": LOOK_AGAIN_MS},
            )
            rows |= {row[0]: row for row in unused}
            refs = []
            if looked < WEIGHTS_AT_ONCE:
                break
        return [weights_record(rows[key]) for key in sorted(rows)]

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
        args = {
            "epoch": str(self._epoch), "prefix": fleet_keys.prefix(pool), "ref": ref,
            "folder": external_folder(ref),
        }  # fmt: skip
        answer = self._forget(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"LAST")

    def sweep_lease(self) -> SweepLease:
        """Compete for the right to sweep this pool's files."""
        return SweepLease(self._redis, fleet_keys.pool_sweeper(self._pool), self._worker)

    def knows(self, digest: str) -> bool:
        """Tell whether some weights have this content: a folder without is a leftover."""
        return bool(self._redis.exists(weights_keys.content(self._pool, digest)))

    def knows_optimizer(self, digest: str) -> bool:
        """Tell whether some weights have this optimizer state: a file without is a leftover."""
        return bool(self._redis.exists(weights_keys.optimizer_content(self._pool, digest)))

    def knows_external(self, folder: str) -> bool:
        """Tell whether some weights have this folder (`external_folder`) of encrypted files."""
        return bool(self._redis.sismember(weights_keys.external_folders(self._pool), folder))

    @cached_property
    def _base_model(self) -> str:
        row = self._redis.hget(fleet_keys.pools(), self._pool)
        return str(json.loads(row)["base_model"])
