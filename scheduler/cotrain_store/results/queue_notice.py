"""Notices for waiting requests: the position in the queue, the expected time, and a missing seq before them."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cotrain_store import redis_keys
from cotrain_store.messages.fleet import WEIGHT, PlanPolicy, restoring_text
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId
from cotrain_store.monitoring.fleet import pool_status
from cotrain_store.redis_client.connection import Connection
from cotrain_store.tenants.policies import read_policy

#: Lifetime of a read backlog. Thousands of polls end at once, and numbers that are 1 s old suffice.
KEPT_S = 1.0


@dataclass(frozen=True)
class Backlog:
    """Pending work of the tenants in one pool, and the total speed of its live workers."""

    tokens: Mapping[TenantId, int]
    """Tokens of training requests that were accepted and are not done."""
    samples: Mapping[TenantId, int]  # number of sample requests, waiting or running
    workers: int
    tokens_per_s: float
    policy: PlanPolicy = field(default_factory=PlanPolicy)
    sample_tokens: Mapping[TenantId, int] = field(default_factory=dict)
    """Maximum number of tokens of those sample requests."""
    sample_tokens_per_s: float = 0.0
    restoring: Mapping[WorkerId, str] = field(default_factory=dict)
    """Workers that restore runs, each with its progress in words."""

    def expected_s(self, tenant: TenantId) -> float:
        """Return the seconds until all queued training of a tenant is done.

        Tenants take turns by tokens, in proportion to their weights. Each other tenant is therefore served at most the
        tenant's own queued tokens first, scaled by the ratio of the weights. Paused tenants are not served.
        """
        own = self.tokens.get(tenant, 0)
        before = sum(
            min(tokens, own * self._weight(other) / self._weight(tenant))
            for other, tokens in self.tokens.items()
            if other not in self.policy.pauses.tenants
        )
        return _seconds(before, self.tokens_per_s)

    def max_sampling_s(self, tenant: TenantId) -> float:
        """Return the seconds until all sample requests of a tenant are done, if none stops early.

        Decoders give tenants turns by tokens, regardless of their weights.
        """
        own = self.sample_tokens.get(tenant, 0)
        before = sum(
            min(tokens, own) for other, tokens in self.sample_tokens.items() if other not in self.policy.pauses.tenants
        )
        return _seconds(before, self.sample_tokens_per_s)

    def _weight(self, tenant: TenantId) -> float:
        return self.policy.weights.get(tenant, WEIGHT)


def training_notice(backlog: Backlog, tenant: TenantId, position: int, worker: WorkerId | None = None) -> str:
    """Return the notice of a training request at `position` (from 1) among its run's unfinished requests.

    `worker` is the current or last worker of the run.
    """
    restoring = backlog.restoring.get(worker, "") if worker else ""
    about = _about("about", backlog.expected_s(tenant))
    return (
        f"{_restoring(restoring)}position {position} in its run's queue, next to "
        f"{_others(backlog.tokens, tenant)}{about}"
    )


def sample_notice(backlog: Backlog, tenant: TenantId, waiting_before: int | None) -> str:
    """Return the notice of a sample request. `waiting_before` is None if a worker has claimed it."""
    where = "with a worker" if waiting_before is None else f"{waiting_before} before it wait"
    about = _about("at most about", backlog.max_sampling_s(tenant))
    is_any_free = len(backlog.restoring) < backlog.workers
    restoring = "" if is_any_free else next(iter(backlog.restoring.values()), "")
    return (
        f"{_restoring(restoring)}one of your {backlog.samples.get(tenant, 0)} sample requests ({where}), next to "
        f"{_others(backlog.samples, tenant)}{about}"
    )


def _restoring(progress: str) -> str:
    return f"worker is restoring: {progress}; " if progress else ""


def _about(how: str, seconds: float) -> str:
    return f"; {how} {math.ceil(seconds)} s for all that you have sent" if seconds < math.inf else ""


def _seconds(tokens: float, tokens_per_s: float) -> float:
    return tokens / tokens_per_s if tokens_per_s > 0 else math.inf


def _others(work: Mapping[TenantId, int], tenant: TenantId) -> str:
    count = sum(amount > 0 for other, amount in work.items() if other != tenant)
    return "1 other tenant with work" if count == 1 else f"{count} other tenants with work"


class Backlogs:
    """Reader of the backlog of each pool, at most once in KEPT_S. Its cost depends on the active tenants only."""

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
        status = await pool_status(self._redis, pool)
        return Backlog(
            tokens={queue.tenant: queue.tokens for queue in status.queues},
            samples={queue.tenant: queue.samples_waiting + queue.samples_running for queue in status.queues},
            workers=len(status.workers),
            tokens_per_s=sum(worker.tokens_per_s for worker in status.workers),
            policy=await read_policy(self._redis),
            sample_tokens={queue.tenant: queue.sample_tokens for queue in status.queues},
            sample_tokens_per_s=sum(worker.sample_tokens_per_s for worker in status.workers),
            restoring={each.id: text for each in status.workers if (text := restoring_text(each.restoring))},
        )


async def client_seq(connection: Connection, pool: PoolId, run: RunId, log_seq: int) -> int:
    """Return the client's seq for a seq of the log: the client does not count unnumbered ops."""
    unnumbered = await connection.zrange(redis_keys.unnumbered_ops(pool, run), 0, -1)
    return log_seq - sum(int(op) < log_seq for op in unnumbered)


def not_yet_here(missing: int, left_s: float) -> str:
    """Return the reason why a request waits behind one that its client may still be sending."""
    return (
        f"waiting for seq_id {missing}, which has not reached the server yet; without it what waits "
        f"here fails in {math.ceil(left_s)} s"
    )


def still_waiting(missing: int, left_s: float) -> str:
    """Return the reason why a request waits, and the remedy."""
    return (
        f"waiting for seq_id {missing}, which never reached the server: its client failed before "
        "it was sent, or is not done with it. Where it failed, go on with a new training client "
        f"from the last checkpoint; what waits here fails in {math.ceil(left_s)} s (COTRAIN_GAP_LIMIT_S)"
    )


def given_up(missing: int) -> str:
    """Return the reason why a request failed, and the remedy."""
    return (
        f"seq_id {missing} of this run never reached the server: its client failed before it was "
        "sent. This request waited behind it for COTRAIN_GAP_LIMIT_S, was given up, and changed "
        "nothing; so does what is sent later. Go on with a new training client from the last "
        f"checkpoint, or send seq_id {missing}."
    )
