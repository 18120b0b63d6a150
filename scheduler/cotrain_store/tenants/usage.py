"""Hourly usage of tenants. This module only reads: the commits of workers write the counts."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, TypeAlias, cast

from cotrain_store.keys import tenant_keys
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.connection import Connection

What: TypeAlias = Literal[
    "training_tokens", "device_s", "prefill_tokens", "cached_tokens", "sampled_tokens", "checkpoints"
]
HOUR = timedelta(hours=1)


@dataclass(frozen=True)
class UsageRow:
    """Amount of one kind that one run or sampler used in one hour."""

    hour: datetime  # start of the hour
    what: What
    base_model: str
    session: str
    source: str  # run or sampler
    amount: float


class Usage:
    """Reader of the usage of tenants."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def rows(self, tenant: TenantId, start: datetime, end: datetime) -> list[UsageRow]:
        """Return the usage of the hours from `start` until before `end`, both whole hours."""
        hours = [start + HOUR * number for number in range((end - start) // HOUR)]
        pipeline = self._redis.pipeline(transaction=False)
        for hour in hours:
            pipeline.hgetall(tenant_keys.usage(tenant, int(hour.timestamp())))
        found = zip(hours, await pipeline.execute(), strict=True)
        return [_row(hour, *item) for hour, fields in found for item in fields.items()]


def _row(hour: datetime, field: bytes, amount: bytes) -> UsageRow:
    what, _, rest = field.decode().partition("|")
    # Only the base model's name may contain a bar.
    base_model, session, source = rest.rsplit("|", 2)
    return UsageRow(hour, cast("What", what), base_model, session, source, float(amount))
