"""What runs and samplers used, by the keys and fields under which their tenants' hours hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.keys import tenant_keys
from cotrain_store.messages.sample_ids import parse_sample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ids import RequestId, RunId, TenantId
    from cotrain_store.messages.ops import RunUsage
    from cotrain_store.messages.samples import SampleUsage


def usage_hour(now_s: float) -> int:
    """Give the start of an hour, as `keys.usage` names it."""
    return int(now_s // 3600) * 3600


def usage_field(what: str, base_model: str, user: str) -> str:
    """Name an amount in the hash of an hour; `user` is a run or a sampler."""
    return f"{what}|{base_model}|{user.partition(':')[0]}|{user}"


def training_amounts(
    usage: Mapping[RunId, RunUsage],
    tenant_by_run: Mapping[RunId, TenantId],
    base_model: str,
    now_s: float,
) -> dict[str, dict[str, float]]:
    """Sort what runs used by the hours (keys) of their tenants."""
    amounts: dict[str, dict[str, float]] = {}
    for run, used in usage.items():
        hour = amounts.setdefault(tenant_keys.usage(tenant_by_run[run], usage_hour(now_s)), {})
        hour[usage_field("training_tokens", base_model, run)] = used.tokens
        hour[usage_field("device_s", base_model, run)] = used.device_s
    return amounts


def sampling_amounts(
    request: RequestId, used: SampleUsage | None, base_model: str
) -> dict[str, float]:
    """Name what a sample request used; nothing where that is not known."""
    name = parse_sample(request)
    if used is None or name is None:
        return {}
    amounts: dict[str, float] = {
        "prefill_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "sampled_tokens": used.sampled_tokens,
        "device_s": used.device_s,
    }
    return {
        usage_field(what, base_model, name.sampler): amount
        for what, amount in amounts.items()
        if amount
    }
