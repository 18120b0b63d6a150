"""Saved weights as their worker sees them: stored, published, failed, and deleted once unused."""

import json
import time
from dataclasses import replace
from functools import cached_property

from cotrain_store import redis_keys
from cotrain_store.disk.stored_results import UNLOADED
from cotrain_store.disk.sweep import SweepLease
from cotrain_store.messages.ids import PoolId, RequestId, TenantId, WeightsRef, WorkerId, decode, encode, run_of
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import WEIGHTS_FIELDS, CheckpointRecord, WeightsRecord, external_folder, weights_record
from cotrain_store.redis_client.connection import SyncConnection
from cotrain_store.redis_client.scripts import sync_script, worker_args
from cotrain_store.usage import usage_field, usage_hour

#: Number of weights checked in one script, which blocks Redis for about 20 µs each.
WEIGHTS_AT_ONCE = 250
#: Maximum number of scripts per sweep that check weights which lost a reference.
LOOKS = 8
#: Time in ms after which temporarily used weights are checked again.
LOOK_AGAIN_MS = 3600 * 1000


class SavedWeights:
    """Access of one worker to the saved weights of its pool.

    Methods that write raise Fenced if another process took over this worker id.
    """

    def __init__(self, connection: SyncConnection, pool: PoolId, worker: WorkerId, epoch: int) -> None:
        self._redis = connection
        self._pool = pool
        self._worker = worker
        self._own = worker_args(pool, worker, epoch)
        self._cursor = 0
        self._stored = sync_script(connection, "weights_stored")
        self._lost = sync_script(connection, "weights_lost")
        self._list_unused = sync_script(connection, "weights_unused")
        self._forget = sync_script(connection, "weights_forget")

    def weights(self, ref: WeightsRef) -> WeightsRecord | None:
        """Return the record of weights, or None if they were deleted."""
        row = self._redis.hmget(redis_keys.weights(ref), WEIGHTS_FIELDS)
        return weights_record(row) if row[0] else None

    def unstored(self) -> list[WeightsRecord]:
        """Return the weights that only this worker has in memory, oldest first. After a crash, a replay of
        the log recreates them.
        """
        members = self._redis.smembers(redis_keys.unstored_weights(self._pool, self._worker))
        found = [self.weights(WeightsRef(member.decode())) for member in members]
        return sorted((w for w in found if w), key=lambda weights: weights.created_at)

    def mark_stored(self, ref: WeightsRef, digest: str, size: int, optimizer_digest: str = "") -> bool:
        """Mark weights as stored: all their files, `size` bytes in total, are durable.

        This publishes the checkpoint and the result of a named save. It also ends the run, if the save was
        its last op. Return False if the weights do not exist: deleted, lost, or rejected because the name
        was in use. The first digest is kept.
        """
        now = time.time()
        checkpoint, result = self._unpublished(ref, size)
        tenant = checkpoint.tenant if checkpoint else TenantId("")
        args = {
            **self._own, "ref": ref, "digest": digest, "size": size, "optimizer": optimizer_digest,
            "checkpoint": encode(checkpoint) if checkpoint else "",
            "closing": UNLOADED.encode().decode(),
            "usage": redis_keys.usage(tenant, usage_hour(now)),
            "used": usage_field("checkpoints", self._base_model, run_of(RequestId(ref))),
            "usage_ttl_s": redis_keys.USAGE_TTL_S,
        }  # fmt: skip
        return bool(self._stored(args, result) == b"OK")

    def _unpublished(self, ref: WeightsRef, size: int) -> tuple[CheckpointRecord | None, bytes]:
        """Return the unpublished checkpoint and result of a named save, with its size filled in.

        Only this worker changes them. A script that finds the weights deleted uses neither.
        """
        text, value = self._redis.hmget(redis_keys.weights(ref), ["checkpoint", "result"])
        if text is None:
            return None, b""
        checkpoint = replace(decode(CheckpointRecord, json.loads(text)), size=size)
        result = Result.decode(value)
        if checkpoint.kind == "external_weights" and result.kind is ResultKind.JSON:
            result = Result.of_json({**result.json(), "size_bytes": size})
        return checkpoint, result.encode()

    def fail_save(self, ref: WeightsRef, message: str) -> None:
        """Fail a named save that cannot be recreated, with category server.

        Its name becomes available. Stored weights, and those of a sampler, are not affected.
        """
        args = {
            **self._own, "ref": ref, "result": Result.failed(message, "server").encode().decode(),
            "ttl_ms": redis_keys.SMALL_RESULT_TTL_MS, "closing": UNLOADED.encode().decode(),
            "folder": external_folder(ref),
        }  # fmt: skip
        self._lost(args)

    def unused_weights(self) -> list[WeightsRecord]:
        """Return stored weights of this pool without a reference from a checkpoint, live sampler or load.

        It checks weights that lost a reference since the last call, and a rotating part of all weights. The
        cost does not depend on their number.
        """
        self._cursor, some = self._redis.sscan(redis_keys.pool_weights(self._pool), self._cursor, count=WEIGHTS_AT_ONCE)
        rows: dict[bytes, list[bytes]] = {}
        refs = [ref.decode() for ref in some]
        for _ in range(LOOKS):
            looked, *unused = self._list_unused(
                {**self._own, "refs": refs, "most": WEIGHTS_AT_ONCE, "again_ms": LOOK_AGAIN_MS}
            )
            rows |= {row[0]: row for row in unused}
            refs = []
            if looked < WEIGHTS_AT_ONCE:
                break
        return [weights_record(rows[key]) for key in sorted(rows)]

    def forget_weights(self, ref: WeightsRef) -> bool:
        """Delete the record of weights unless they are in use again. Return True if no others have their content.

        Their folder may then be removed, but not immediately: another worker may have found it and be about
        to call `mark_stored`.
        """
        return bool(self._forget({**self._own, "ref": ref, "folder": external_folder(ref)}) == b"LAST")

    def sweep_lease(self) -> SweepLease:
        """Return the lease to sweep this pool's files."""
        return SweepLease(self._redis, redis_keys.pool_sweeper(self._pool), self._worker)

    def has_content(self, digest: str) -> bool:
        """Return True if any weights have this content. A folder without weights is an orphan."""
        return bool(self._redis.exists(redis_keys.content(self._pool, digest)))

    def has_optimizer(self, digest: str) -> bool:
        """Return True if any weights have this optimizer state. A file without weights is an orphan."""
        return bool(self._redis.exists(redis_keys.optimizer_content(self._pool, digest)))

    def has_external(self, folder: str) -> bool:
        """Return True if any weights have this folder (`external_folder`) of encrypted files."""
        return bool(self._redis.sismember(redis_keys.external_folders(self._pool), folder))

    @cached_property
    def _base_model(self) -> str:
        row = self._redis.hget(redis_keys.pools(), self._pool)
        return str(json.loads(row)["base_model"])
