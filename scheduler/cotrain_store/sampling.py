"""Claim sample requests, resolve them, keep the weights they need: a worker's side of sampling.

Plain synchronous and fenced by the worker's epoch, as execution is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.connection import SyncConnection
    from cotrain_store.messages import (
        PoolId,
        RequestId,
        Result,
        SamplerId,
        TenantId,
        WeightsRecord,
        WeightsRef,
        WorkerId,
    )
    from cotrain_store.samples import SampleBody
    from cotrain_store.spool import Spool


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
    """One worker's access to the sample requests and sampler weights of its pool.

    Everything here raises Fenced when another process took this worker's place.
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
        raise NotImplementedError

    def requeue(self) -> int:
        """At enter: put what a dead predecessor ran back at the front, in order; count it."""
        raise NotImplementedError

    def give_back(self) -> int:
        """At leave: put what this process runs back at the front; no death is counted."""
        raise NotImplementedError

    def claim(self, most: int) -> list[ClaimedSample]:
        """Take waiting requests, one per tenant in turn; what only this worker can run comes first."""
        raise NotImplementedError

    def risk(self, request: RequestId) -> None:
        """Count a death over this claimed request in advance: nobody may be left to do it after."""
        raise NotImplementedError

    def resolve(self, results: Mapping[RequestId, Result], counted: Mapping[str, float]) -> None:
        """Make results visible, free what the requests held, tell their clients. First result wins.

        `counted` is added to the pool's totals.
        """
        raise NotImplementedError

    def cancelled(self) -> list[RequestId]:
        """List the requests of this worker that their clients cancelled; resolve them as CANCELLED."""
        raise NotImplementedError

    def depth(self) -> int:
        """Count the requests that wait in this pool, whoever may run them."""
        raise NotImplementedError

    def weights(self, ref: WeightsRef) -> WeightsRecord | None:
        """Read what is known of sampler weights; None once they are forgotten."""
        raise NotImplementedError

    def unstored(self) -> list[WeightsRecord]:
        """List the weights that nobody but this worker has; after a crash: that a replay makes again."""
        raise NotImplementedError

    def stored(self, ref: WeightsRef, digest: str, size: int) -> bool:
        """Note that a folder is durable; False when the weights are forgotten. The first digest stays."""
        raise NotImplementedError

    def unused_weights(self) -> list[WeightsRecord]:
        """List the stored weights of this pool that no checkpoint and no living sampler refers to."""
        raise NotImplementedError

    def forget_weights(self, ref: WeightsRef) -> bool:
        """Forget weights unless they are in use again; True when nothing else has their content.

        Then their folder may go. Another worker may be about to store the same content: rename the
        folder away, ask `knows`, and rename it back if so; who stores, looks for its folder after.
        """
        raise NotImplementedError

    def knows(self, digest: str) -> bool:
        """Tell whether some weights have this content: a folder without is a leftover."""
        raise NotImplementedError
