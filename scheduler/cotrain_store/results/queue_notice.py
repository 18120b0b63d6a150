"""Say where a request stands that waits: its position in its run's queue, and how long that may take."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cotrain_store.keys import fleet_keys, run_keys, sample_keys
from cotrain_store.messages.ids import TenantId, WorkerId
from cotrain_store.messages.pauses import WEIGHT, PlanPolicy
from cotrain_store.tenants.pauses import read_pauses
from cotrain_store.tenants.policies import read_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ids import PoolId
    from cotrain_store.redis_client.connection import Connection

#: Polls end by the thousand at once, and numbers of a second ago are as good.
KEPT_S = 1.0


@dataclass(frozen=True)
class Backlog:
    """What tenants wait for in one pool, and how fast its living workers go together."""

    tokens: Mapping[TenantId, int]
    """Of training requests that were accepted and are not done."""
    samples: Mapping[TenantId, int]
    """Sample requests, waiting or running."""
    workers: int
    tokens_per_s: float
    policy: PlanPolicy = field(default_factory=PlanPolicy)

    def expected_s(self, tenant: TenantId) -> float:
        """Return the seconds until all that a tenant has queued is trained.

        Tenants take turns by tokens, each in proportion to its weight, so that of each neighbour no more comes
        before it than the tenant has queued itself, by their weights; of one that is paused, nothing.
        """
        own = self.tokens.get(tenant, 0)
        before = sum(
            min(tokens, own * self._weight(other) / self._weight(tenant))
            for other, tokens in self.tokens.items()
            if other not in self.policy.pauses.tenants
        )
        return before / self.tokens_per_s if self.tokens_per_s > 0 else math.inf

    def _weight(self, tenant: TenantId) -> float:
        return self.policy.weights.get(tenant, WEIGHT)


def training_notice(backlog: Backlog, tenant: TenantId, position: int) -> str:
    """Say where a training request stands that is number `position` (from 1) of its run's that are not done."""
    seconds = backlog.expected_s(tenant)
    about = (
        f"; about {math.ceil(seconds)} s for all that you have sent" if seconds < math.inf else ""
    )
    return (
        f"position {position} in its run's queue, next to {_others(backlog.tokens, tenant)}{about}"
    )


def sample_notice(backlog: Backlog, tenant: TenantId) -> str:
    """Say how many sample requests of a tenant are not done, next to whose."""
    count = backlog.samples.get(tenant, 0)
    return f"one of your {count} sample requests, next to {_others(backlog.samples, tenant)}"


def _others(work: Mapping[TenantId, int], tenant: TenantId) -> str:
    count = sum(amount > 0 for other, amount in work.items() if other != tenant)
    return "1 other tenant with work" if count == 1 else f"{count} other tenants with work"


class Backlogs:
    """Reads the backlog of each pool, at most once in KEPT_S; it costs what is active."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._read: dict[PoolId, tuple[float, Backlog]] = {}

    async def of(self, pool: PoolId) -> Backlog:
        """Return a pool's backlog, up to KEPT_S old."""
        at, backlog = self._read.get(pool, (-math.inf, None))
        if backlog is None or time.monotonic() - at > KEPT_S:
            backlog = await self._now(pool)
            self._read[pool] = (time.monotonic(), backlog)
        return backlog

    async def _now(self, pool: PoolId) -> Backlog:
        tenants = _names(await self._redis.smembers(run_keys.queue_tenants(pool)))
        workers = _names(await self._redis.smembers(fleet_keys.workers(pool)))
        pipeline = self._redis.pipeline(transaction=False)
        for name in tenants:
            pipeline.hget(run_keys.queue(pool, TenantId(name)), "tokens")
            pipeline.hmget(sample_keys.sample_load(pool, TenantId(name)), ["waiting", "running"])
        for name in workers:
            pipeline.get(fleet_keys.worker(pool, WorkerId(name)))
        rows: list[Any] = await pipeline.execute()
        policy = PlanPolicy(await read_weights(self._redis), await read_pauses(self._redis))
        queued, heartbeats = (
            rows[: 2 * len(tenants)],
            [row for row in rows[2 * len(tenants) :] if row],
        )
        return Backlog(
            tokens={
                TenantId(n): int(row or 0) for n, row in zip(tenants, queued[::2], strict=True)
            },
            samples={
                TenantId(n): sum(int(count or 0) for count in row)
                for n, row in zip(tenants, queued[1::2], strict=True)
            },
            workers=len(heartbeats),
            tokens_per_s=sum(
                float(json.loads(heartbeat)["tokens_per_s"]) for heartbeat in heartbeats
            ),
            policy=policy,
        )


def _names(members: set[bytes]) -> list[str]:
    return sorted(member.decode() for member in members)
