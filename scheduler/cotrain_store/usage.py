"""Usage of tenants by the hour, and counts of a pool by the minute: the amounts of a commit, and the hours of a tenant."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, cast

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId, RunId, TenantId, parse_sample
from cotrain_store.messages.ops import RunUsage, SampleUsage
from cotrain_store.redis_client.connection import Connection, replies

UsageKind: TypeAlias = Literal[
    "training_tokens", "device_s", "prefill_tokens", "cached_tokens", "sampled_tokens", "checkpoints"
]
HOUR = timedelta(hours=1)
#: Fields of a pool's minute; times in s.
MINUTE_FIELDS = (
    "cycles", "tokens", "padding_tokens", "ops", "failed", "train_s", "optim_s", "sampled_tokens", "sample_s",
)  # fmt: skip


@dataclass(frozen=True)
class UsageRow:
    """Amount of one kind that one run or sampler used in one hour."""

    hour: datetime  # start of the hour
    what: UsageKind
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
        keys = (redis_keys.usage(tenant, int(hour.timestamp())) for hour in hours)
        rows = await replies(self._redis, (("HGETALL", key) for key in keys))
        return [_row(hour, *item) for hour, row in zip(hours, rows, strict=True) for item in row.items()]


def _row(hour: datetime, field: bytes, amount: bytes) -> UsageRow:
    what, _, rest = field.decode().partition("|")
    # Only the base model's name may contain a bar.
    base_model, session, source = rest.rsplit("|", 2)
    return UsageRow(hour, cast("UsageKind", what), base_model, session, source, float(amount))


def usage_hour(now_s: float) -> int:
    """Return the start of an hour, in s since the epoch, as in `usage`."""
    return int(now_s // 3600) * 3600


def usage_field(what: str, base_model: str, user: str) -> str:
    """Return the field of an amount in the hash of an hour; `user` is a run or a sampler."""
    return f"{what}|{base_model}|{user.partition(':')[0]}|{user}"


def training_amounts(
    used_by_run: Mapping[RunId, RunUsage], tenant_by_run: Mapping[RunId, TenantId], base_model: str, now_s: float
) -> dict[str, dict[str, float]]:
    """Return the usage of runs, grouped by the key of their tenant's hour."""
    amounts: dict[str, dict[str, float]] = {}
    for run, used in used_by_run.items():
        hour = amounts.setdefault(redis_keys.usage(tenant_by_run[run], usage_hour(now_s)), {})
        hour[usage_field("training_tokens", base_model, run)] = used.tokens
        hour[usage_field("device_s", base_model, run)] = used.device_s
    return amounts


def sampling_amounts(request: RequestId, used: SampleUsage | None, base_model: str) -> dict[str, float]:
    """Return the usage fields of a sample request; empty if its usage is unknown."""
    name = parse_sample(request)
    if used is None or name is None:
        return {}
    amounts: dict[str, float] = {
        "prefill_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "sampled_tokens": used.sampled_tokens,
        "device_s": used.device_s,
    }
    return {usage_field(what, base_model, name.sampler): amount for what, amount in amounts.items() if amount}


def minute_of(now_s: float) -> int:
    """Return the start of a minute, in s since the epoch."""
    return int(now_s // 60) * 60


def tenant_tokens(tenant: TenantId | str) -> str:
    """Return the field of the tokens that a tenant trained on."""
    return f"tokens|{tenant}"


def tenant_seconds(tenant: TenantId | str) -> str:
    """Return the field of the device seconds that a tenant used, for training or sampling."""
    return f"device_s|{tenant}"


def cycle_counts(
    record: Mapping[str, Any], usage: Mapping[RunId, RunUsage], tenant_by_run: Mapping[RunId, TenantId]
) -> dict[str, float]:
    """Return the counts of a cycle, computed from its history record."""
    counts: dict[str, float] = {
        "cycles": 1,
        "tokens": record.get("tokens", 0),
        "padding_tokens": (record.get("padded_tokens") or 0) - (record.get("computed_tokens") or 0),
        "train_s": (record.get("wave_ms") or 0) / 1000,
        "optim_s": (record.get("optim_ms") or 0) / 1000,
    }
    for run in record.get("runs", ()):
        name = tenant_tokens(run["tenant"])
        counts[name] = counts.get(name, 0) + run["tokens"]
        counts["ops"] = counts.get("ops", 0) + sum(run["ops"].values())
        counts["failed"] = counts.get("failed", 0) + run["failed"]
    for used_by, used in usage.items():
        name = tenant_seconds(tenant_by_run[used_by])
        counts[name] = counts.get(name, 0.0) + used.device_s
    return {name: value for name, value in counts.items() if value}


def sample_counts(used: SampleUsage | None) -> dict[str, float]:
    """Return the counts of a finished sample request; empty if its usage is unknown."""
    if used is None:
        return {}
    counts = {"sampled_tokens": float(used.sampled_tokens), "sample_s": used.device_s}
    return {name: value for name, value in counts.items() if value}
