"""Accept and cancel sample requests: the API's side of sampling.

They are no part of a run's log: they change nothing, so each may run anywhere, in any order, and
again after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.connection import Connection
    from cotrain_store.messages import RequestId, SamplerRecord, TenantId
    from cotrain_store.samples import SampleBody
    from cotrain_store.spool import Spool


@dataclass(frozen=True)
class SampleLimits:
    """What one tenant may have waiting and running in one pool."""

    requests: int = 4_096
    bytes: int = 256_000_000


class SampleIntake:
    """Accept sample requests, and cancel them."""

    def __init__(
        self,
        connection: Connection,
        spool: Spool,
        limits: SampleLimits,
        disk_reserve_bytes: int = 0,
    ) -> None:
        raise NotImplementedError

    async def submit(self, sampler: SamplerRecord, seq: int, body: SampleBody) -> RequestId:
        """Accept one sample request; durable when this returns. Twice with the same body is one.

        Raises:
            SeqConflict: this seq was used with other content.
            SamplerNotFound: it expired meanwhile.
            SessionFinished: its session has ended.
            SamplingBusy, StoreFull, DiskReserveReached, StoreUnavailable: nothing is wrong; later.
        """
        raise NotImplementedError

    async def cancel(self, tenant: TenantId, request: RequestId) -> None:
        """Stop a sample request; one that is unknown, foreign or finished is left as it is.

        A waiting one fails at once, a running one as soon as its worker hears of it.
        """
        raise NotImplementedError
