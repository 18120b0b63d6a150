"""Redis keys of tenants: API keys, sessions, limits and lists of their records.

The module also has the keys of webhooks and their undelivered events, and the keys and fields of a
tenant's hourly usage.
"""

from __future__ import annotations

from collections.abc import Mapping

from cotrain_store.messages.ids import RequestId, RunId, SessionId, TenantId
from cotrain_store.messages.ops import RunUsage
from cotrain_store.messages.samples import SampleUsage, parse_sample

#: A session without a heartbeat for this long is shown as ended. The SDK sends one every 10 s and
#: itself warns after 120 s.
SESSION_HEARTBEAT_TTL_MS = 180_000
#: Lifetime of the usage of an hour.
USAGE_TTL_S = 100 * 24 * 3600


def api_key(key_id: str) -> str:
    """Return the key of an issued API key's hash (digest, tenant, not_after); removed when
    revoked.
    """
    return f"cotrain:key:{key_id}"


def api_keys() -> str:
    """Return the key of the set of the ids of issued API keys; kept permanently."""
    return "cotrain:keys"


def tenant_names() -> str:
    """Return the key of the hash tenant id → display name: the name of its first key; kept
    permanently.
    """
    return "cotrain:tenants:names"


def chosen_keys() -> str:
    """Return the key of the hash of a chosen key's digest → id and tenant (JSON); kept permanently,
    authenticates nothing.
    """
    return "cotrain:keys:chosen"


def settings_keys() -> str:
    """Return the key of the hash key id → record (JSON), for the keys in the settings of the API
    started last.
    """
    return "cotrain:keys:settings"


def key_uses() -> str:
    """Return the key of the hash key id → time of last use (s); a field is deleted with the key."""
    return "cotrain:keys:used"


def limits(tenant: TenantId) -> str:
    """Return the key of the hash quota → limit that the operator set for a tenant; other quotas
    have their default.

    A field is kept until the limit is removed.
    """
    return f"cotrain:tenant:{tenant}:limits"


def weights() -> str:
    """Return the key of the hash tenant → weight in fair queueing. A missing field is 1; setting 1
    removes it.
    """
    return "cotrain:tenants:weights"


def paused_tenants() -> str:
    """Return the key of the hash tenant → its pause (JSON); a field is kept until the tenant is
    resumed.
    """
    return "cotrain:tenants:paused"


def paused_runs() -> str:
    """Return the key of the hash run → its pause (JSON); a field is kept until the run is resumed
    or ends.
    """
    return "cotrain:runs:paused"


def signing_secret() -> str:
    """Return the key of the hash of the secrets (current, previous) that sign links and tokens."""
    return "cotrain:secret:signing"


def ended_session(nonce: str) -> str:
    """Return the key of the mark of a browser session ended by a logout; expires with the
    session.
    """
    return f"cotrain:ui:ended:{nonce}"


def session(session_id: SessionId) -> str:
    """Return the key of a session's record; kept with its runs."""
    return f"cotrain:session:{session_id}"


def session_heartbeat(session_id: SessionId) -> str:
    """Return the key of a session's heartbeat; expires unless renewed."""
    return f"cotrain:session:{session_id}:beat"


def session_runs(session_id: SessionId) -> str:
    """Return the key of the set of a session's runs; kept with the session."""
    return f"cotrain:session:{session_id}:runs"


def session_samplers(session_id: SessionId) -> str:
    """Return the key of the set of a session's samplers; expired ones are removed when the set is
    read.
    """
    return f"cotrain:session:{session_id}:samplers"


def tenant_runs(tenant: TenantId) -> str:
    """Return the key of the set of a tenant's live runs, counted by the quota."""
    return f"cotrain:tenant:{tenant}:runs"


def training_runs(tenant: TenantId) -> str:
    """Return the key of the sorted set of all runs of a tenant (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:training_runs"


def all_training_runs() -> str:
    """Return the key of the sorted set of the runs of all tenants (score: created_at, in s); kept permanently."""
    return "cotrain:training_runs"


def labelled_runs(tenant: TenantId) -> str:
    """Return the key of the sorted set of a tenant's runs with a note or a tag (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:labelled_runs"


def tenant_sessions(tenant: TenantId) -> str:
    """Return the key of the sorted set of a tenant's sessions (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:sessions"


def living_sessions(tenant: TenantId) -> str:
    """Return the key of the sorted set of a tenant's live sessions (score: end of life without a
    heartbeat, in ms).
    """
    return f"cotrain:tenant:{tenant}:living_sessions"


def tenant_samplers(tenant: TenantId) -> str:
    """Return the key of the sorted set of a tenant's samplers (score: expiry without use, in
    ms).
    """
    return f"cotrain:tenant:{tenant}:samplers"


def sampler_bytes(tenant: TenantId) -> str:
    """Return the key of the hash of weight sizes, and their sum, for samplers made by a save
    without a name.

    Deleted with the samplers.
    """
    return f"cotrain:tenant:{tenant}:sampler_bytes"


def record_bytes(tenant: TenantId) -> str:
    """Return the key of the byte count of a tenant's records of sessions and runs, which are kept
    permanently.
    """
    return f"cotrain:tenant:{tenant}:record_bytes"


def histories(tenant: TenantId) -> str:
    """Return the key of the sorted set of a tenant's runs with a history (score: its newest point,
    in s).

    The oldest histories are deleted when the quota of points is full.
    """
    return f"cotrain:tenant:{tenant}:histories"


def history_points(tenant: TenantId) -> str:
    """Return the key of the hash of a tenant's number of history points, and the quota when its
    newest run was made.
    """
    return f"cotrain:tenant:{tenant}:history"


def run_bytes() -> str:
    """Return the key of the sorted set of tenants (score: bytes that their runs hold); tenants at 0
    are removed.
    """
    return "cotrain:tenants:run_bytes"


def unwritten_run_bytes() -> str:
    """Return the key of the number of bytes that all runs may still write; kept permanently."""
    return "cotrain:run_bytes:unwritten"


def usage(tenant: TenantId, hour: int) -> str:
    """Return the key of the hash of one hour, `<amount>|<base model>|<session>|<run or sampler>` →
    value.

    `hour` is its start, in s since the epoch. Amounts: training_tokens, device_s, prefill_tokens
    (the whole prompt), cached_tokens (part of it), sampled_tokens, checkpoints. Expires
    (USAGE_TTL_S).
    """
    return f"cotrain:usage:{tenant}:{hour}"


def audit(tenant: TenantId) -> str:
    """Return the key of the stream of changes of a tenant and its records; about the last 10,000
    are kept.
    """
    return f"cotrain:audit:{tenant}"


def audit_of_all() -> str:
    """Return the key of the stream of the actions of all tenants and the operator; about the last
    10,000 are kept.
    """
    return "cotrain:audit"


#: Lease timeout of the webhook sender.
LEASE_MS = 10_000


def webhook(tenant: TenantId) -> str:
    """Return the key of the hash of a tenant's webhook (id, url, secret, outcomes of its events),
    until removed.
    """
    return f"cotrain:tenant:{tenant}:webhook"


def events(tenant: TenantId) -> str:
    """Return the key of the hash event id → arrival (ms), attempts and body; a field is deleted
    with its event.
    """
    return f"cotrain:tenant:{tenant}:webhook_events"


def due_events(tenant: TenantId) -> str:
    """Return the key of the sorted set of those events (score: next attempt, in ms of the store's
    clock).
    """
    return f"cotrain:tenant:{tenant}:webhook_due"


def due_tenants() -> str:
    """Return the key of the sorted set of tenants with events (score: when the first one is due, in
    ms).
    """
    return "cotrain:webhooks:due"


def lease() -> str:
    """Return the key of the lease of the webhook sender; expires unless renewed."""
    return "cotrain:webhooks:lease"


def epoch() -> str:
    """Return the key of the number of the newest webhook sender; kept permanently, only
    increases.
    """
    return "cotrain:webhooks:epoch"


def usage_hour(now_s: float) -> int:
    """Return the start of an hour, in s since the epoch, as in `usage`."""
    return int(now_s // 3600) * 3600


def usage_field(what: str, base_model: str, user: str) -> str:
    """Return the field of an amount in the hash of an hour; `user` is a run or a sampler."""
    return f"{what}|{base_model}|{user.partition(':')[0]}|{user}"


def training_amounts(
    used_by_run: Mapping[RunId, RunUsage],
    tenant_by_run: Mapping[RunId, TenantId],
    base_model: str,
    now_s: float,
) -> dict[str, dict[str, float]]:
    """Return the usage of runs, grouped by the key of their tenant's hour."""
    amounts: dict[str, dict[str, float]] = {}
    for run, used in used_by_run.items():
        hour = amounts.setdefault(usage(tenant_by_run[run], usage_hour(now_s)), {})
        hour[usage_field("training_tokens", base_model, run)] = used.tokens
        hour[usage_field("device_s", base_model, run)] = used.device_s
    return amounts


def sampling_amounts(
    request: RequestId, used: SampleUsage | None, base_model: str
) -> dict[str, float]:
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
    return {
        usage_field(what, base_model, name.sampler): amount
        for what, amount in amounts.items()
        if amount
    }
