"""The keys of tenants: their API keys, their sessions, and lists of what they have.

The keys of webhooks: where a tenant wants to be notified of its events, and those that it was not notified of yet.

What runs and samplers used, by the keys and fields under which their tenants' hours hold it.
"""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_store.messages.ids import RequestId, RunId, SessionId, TenantId
from cotrain_store.messages.ops import RunUsage
from cotrain_store.messages.samples import SampleUsage, parse_sample

#: A session that sent no heartbeat for this long is shown as ended; the SDK sends one every 10 s and
#: itself warns after 120 s.
SESSION_HEARTBEAT_TTL_MS = 180_000
#: What a tenant used is kept for this long after its hour.
USAGE_TTL_S = 100 * 24 * 3600


def api_key(key_id: str) -> str:
    """Name an issued API key's hash (digest, tenant, not_after); removed when revoked."""
    return f"cotrain:key:{key_id}"


def api_keys() -> str:
    """Name the set of the ids of issued API keys; lives permanently."""
    return "cotrain:keys"


def tenant_names() -> str:
    """Name the hash of tenant id → what people call it: the name of its first key; lives permanently."""
    return "cotrain:tenants:names"


def chosen_keys() -> str:
    """Name the hash of a chosen key's digest → id and tenant (JSON); lives permanently, opens nothing."""
    return "cotrain:keys:chosen"


def settings_keys() -> str:
    """Name the hash of key id → record (JSON) of the keys in the settings of the API started last."""
    return "cotrain:keys:settings"


def key_uses() -> str:
    """Name the hash of key id → when it was last shown (s); a field goes with the key."""
    return "cotrain:keys:used"


def limits(tenant: TenantId) -> str:
    """Name the hash of the limits (quota → number) that the operator gave a tenant; what is not in it has its default.

    A field lives until it is taken back.
    """
    return f"cotrain:tenant:{tenant}:limits"


def weights() -> str:
    """Name the hash of tenant → its weight in fair queueing; without a field it is 1. Lives until it is set to 1."""
    return "cotrain:tenants:weights"


def paused_tenants() -> str:
    """Name the hash of tenant → its pause (JSON); a field lives until the tenant is resumed."""
    return "cotrain:tenants:paused"


def paused_runs() -> str:
    """Name the hash of run → its pause (JSON); a field lives until the run is resumed, or ends."""
    return "cotrain:runs:paused"


def signing_secret() -> str:
    """Name the hash of the secrets that links and tokens are signed with (current, previous)."""
    return "cotrain:secret:signing"


def ended_session(nonce: str) -> str:
    """Name the mark of a browser's session that a logout ended; expires when the session would have ended."""
    return f"cotrain:ui:ended:{nonce}"


def session(session_id: SessionId) -> str:
    """Name a session's record; kept with its runs."""
    return f"cotrain:session:{session_id}"


def session_heartbeat(session_id: SessionId) -> str:
    """Name a session's heartbeat; expires unless renewed."""
    return f"cotrain:session:{session_id}:beat"


def session_runs(session_id: SessionId) -> str:
    """Name the set of a session's runs; kept with the session."""
    return f"cotrain:session:{session_id}:runs"


def session_samplers(session_id: SessionId) -> str:
    """Name the set of a session's samplers; one that expired is struck off when they are read."""
    return f"cotrain:session:{session_id}:samplers"


def tenant_runs(tenant: TenantId) -> str:
    """Name the set of a tenant's live runs: the quota counts it."""
    return f"cotrain:tenant:{tenant}:runs"


def training_runs(tenant: TenantId) -> str:
    """Name the sorted set of all runs of a tenant (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:training_runs"


def all_training_runs() -> str:
    """Name the sorted set of the runs of all tenants (score: created_at, in s); lives permanently."""
    return "cotrain:training_runs"


def all_runs_listed() -> str:
    """Name the mark that the runs of earlier versions are in that set; lives permanently."""
    return "cotrain:training_runs:complete"


def labelled_runs(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's runs with a note or a tag (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:labelled_runs"


def tenant_sessions(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's sessions (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:sessions"


def living_sessions(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's sessions that are alive (score: until when, in ms)."""
    return f"cotrain:tenant:{tenant}:living_sessions"


def tenant_samplers(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's samplers (score: when they expire without use, in ms)."""
    return f"cotrain:tenant:{tenant}:samplers"


def sampler_bytes(tenant: TenantId) -> str:
    """Name the hash of what each sampler's weights weigh that a save without a name left, and their sum.

    Goes with the samplers.
    """
    return f"cotrain:tenant:{tenant}:sampler_bytes"


def record_bytes(tenant: TenantId) -> str:
    """Name the number of bytes of a tenant's records of sessions and runs, which live permanently."""
    return f"cotrain:tenant:{tenant}:record_bytes"


def histories(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's runs that have a history (score: its newest point, in s).

    The first ones go when the quota of points is full.
    """
    return f"cotrain:tenant:{tenant}:histories"


def history_points(tenant: TenantId) -> str:
    """Name the hash of how many points a tenant's histories have, and the quota of its newest run's time."""
    return f"cotrain:tenant:{tenant}:history"


def run_bytes() -> str:
    """Name the sorted set of tenants (score: bytes that their runs hold); one that holds nothing is struck off."""
    return "cotrain:tenants:run_bytes"


def unwritten_run_bytes() -> str:
    """Name the number of bytes that all runs may still write; lives permanently."""
    return "cotrain:run_bytes:unwritten"


def usage(tenant: TenantId, hour: int) -> str:
    """Name the hash `<what>|<base model>|<session>|<run or sampler>` → amount of one hour.

    `hour` is its start, in s since the epoch. What: training_tokens, device_s, prefill_tokens (all
    of the prompt), cached_tokens (of them), sampled_tokens, checkpoints. USAGE_TTL_S.
    """
    return f"cotrain:usage:{tenant}:{hour}"


def audit(tenant: TenantId) -> str:
    """Name the stream of what was done with a tenant's records, and with itself; the last 10,000 or so are kept."""
    return f"cotrain:audit:{tenant}"


def audit_of_all() -> str:
    """Name the stream of what all tenants and the operator did; the last 10,000 or so are kept."""
    return "cotrain:audit"


#: Who delivers is followed by another process when it has not said for so long that it lives.
LEASE_MS = 10_000


def webhook(tenant: TenantId) -> str:
    """Name the hash of a tenant's webhook: id, url, secret, and what became of its events; until removed."""
    return f"cotrain:tenant:{tenant}:webhook"


def events(tenant: TenantId) -> str:
    """Name the hash event id → when it came (ms), attempts and body; a field goes when it is over."""
    return f"cotrain:tenant:{tenant}:webhook_events"


def due_events(tenant: TenantId) -> str:
    """Name the sorted set of those events (score: when to send it next, in ms of the store's clock)."""
    return f"cotrain:tenant:{tenant}:webhook_due"


def due_tenants() -> str:
    """Name the sorted set of tenants with events (score: when the first one is due, in ms)."""
    return "cotrain:webhooks:due"


def lease() -> str:
    """Name who delivers; expires unless renewed."""
    return "cotrain:webhooks:lease"


def epoch() -> str:
    """Name the number of the newest process that delivers; lives permanently, only grows."""
    return "cotrain:webhooks:epoch"


def usage_hour(now_s: float) -> int:
    """Give the start of an hour, as `keys.usage` names it."""
    return int(now_s // 3600) * 3600


def usage_field(what: str, base_model: str, user: str) -> str:
    """Name an amount in the hash of an hour; `user` is a run or a sampler."""
    return f"{what}|{base_model}|{user.partition(':')[0]}|{user}"


def training_amounts(
    used_by_run: Mapping[RunId, RunUsage],
    tenant_by_run: Mapping[RunId, TenantId],
    base_model: str,
    now_s: float,
) -> dict[str, dict[str, float]]:
    """Sort what runs used by the hours (keys) of their tenants."""
    amounts: dict[str, dict[str, float]] = {}
    for run, used in used_by_run.items():
        hour = amounts.setdefault(usage(tenant_by_run[run], usage_hour(now_s)), {})
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
