"""What a pool did in a minute, by the fields under which its hash holds it: for the charts of the last hour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ids import RunId, TenantId
    from cotrain_store.messages.ops import RunUsage
    from cotrain_store.messages.samples import SampleUsage

#: Of the whole pool; times in s.
FIELDS = (
    "cycles", "tokens", "padding_tokens", "ops", "failed", "train_s", "optim_s", "sampled_tokens", "sample_s",
)  # fmt: skip


def minute_of(now_s: float) -> int:
    """Give the start of a minute, in s since the epoch."""
    return int(now_s // 60) * 60


def tenant_tokens(tenant: TenantId | str) -> str:
    """Name the tokens that a tenant trained on."""
    return f"tokens|{tenant}"


def tenant_seconds(tenant: TenantId | str) -> str:
    """Name the seconds of the device that a tenant used, training or sampling."""
    return f"device_s|{tenant}"


def cycle_counts(
    record: Mapping[str, Any],
    usage: Mapping[RunId, RunUsage],
    tenant_by_run: Mapping[RunId, TenantId],
) -> dict[str, float]:
    """Count a cycle, from the record that its history keeps."""
    tokens = record.get("tokens", 0)
    padded = record.get("padded_tokens") or tokens
    counts: dict[str, float] = {
        "cycles": 1,
        "tokens": tokens,
        "padding_tokens": padded - tokens,
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
    """Count a sample request that ended; nothing where that is not known."""
    if used is None:
        return {}
    counts = {"sampled_tokens": float(used.sampled_tokens), "sample_s": used.device_s}
    return {name: value for name, value in counts.items() if value}
