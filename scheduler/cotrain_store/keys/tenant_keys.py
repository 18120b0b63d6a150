"""Redis keys of tenants: API keys, sessions, limits and lists of their records.

The module also has the keys of webhooks and their undelivered events, and the keys and fields of a
tenant's hourly usage.
"""

from collections.abc import Callable, Mapping

from cotrain_store.messages.ids import RequestId, RunId, SessionId, TenantId, parse_sample
from cotrain_store.messages.ops import RunUsage
from cotrain_store.messages.results import SampleUsage

#: A session without a heartbeat for this long is shown as ended. The SDK sends one every 10 s and
#: itself warns after 120 s.
SESSION_HEARTBEAT_TTL_MS = 180_000
#: Lifetime of the usage of an hour.
USAGE_TTL_S = 100 * 24 * 3600

#: Hash of an issued API key (digest, tenant, not_after); removed when revoked.
api_key: Callable[[str], str] = "cotrain:key:{}".format
#: Set of the ids of issued API keys; kept permanently.
api_keys: Callable[[], str] = "cotrain:keys".format
#: Hash tenant id → display name: the name of its first key; kept permanently.
tenant_names: Callable[[], str] = "cotrain:tenants:names".format
#: Hash of a chosen key's digest → id and tenant (JSON); kept permanently, authenticates nothing.
chosen_keys: Callable[[], str] = "cotrain:keys:chosen".format
#: Hash key id → record (JSON), for the keys in the settings of the API started last.
settings_keys: Callable[[], str] = "cotrain:keys:settings".format
#: Hash key id → time of last use (s); a field is deleted with the key.
key_uses: Callable[[], str] = "cotrain:keys:used".format
#: Hash quota → limit that the operator set for a tenant; other quotas have their default.
#: A field is kept until the limit is removed.
limits: Callable[[TenantId], str] = "cotrain:tenant:{}:limits".format
#: Hash tenant → weight in fair queueing. A missing field is 1; setting 1 removes it.
weights: Callable[[], str] = "cotrain:tenants:weights".format
#: Hash tenant → its pause (JSON); a field is kept until the tenant is resumed.
paused_tenants: Callable[[], str] = "cotrain:tenants:paused".format
#: Hash run → its pause (JSON); a field is kept until the run is resumed or ends.
paused_runs: Callable[[], str] = "cotrain:runs:paused".format
#: Hash of the secrets (current, previous) that sign links and tokens.
signing_secret: Callable[[], str] = "cotrain:secret:signing".format
#: Mark of a browser session ended by a logout; expires with the session.
ended_session: Callable[[str], str] = "cotrain:ui:ended:{}".format
#: Record of the session; kept with its runs.
session: Callable[[SessionId], str] = "cotrain:session:{}".format
#: Heartbeat of the session; expires unless renewed.
session_heartbeat: Callable[[SessionId], str] = "cotrain:session:{}:beat".format
#: Set of a session's runs; kept with the session.
session_runs: Callable[[SessionId], str] = "cotrain:session:{}:runs".format
#: Set of a session's samplers; expired ones are removed when the set is read.
session_samplers: Callable[[SessionId], str] = "cotrain:session:{}:samplers".format
#: Set of a tenant's live runs, counted by the quota.
tenant_runs: Callable[[TenantId], str] = "cotrain:tenant:{}:runs".format
#: Sorted set of all runs of a tenant (score: created_at, in s).
training_runs: Callable[[TenantId], str] = "cotrain:tenant:{}:training_runs".format
#: Sorted set of the runs of all tenants (score: created_at, in s); kept permanently.
all_training_runs: Callable[[], str] = "cotrain:training_runs".format
#: Sorted set of a tenant's runs with a note or a tag (score: created_at, in s).
labelled_runs: Callable[[TenantId], str] = "cotrain:tenant:{}:labelled_runs".format
#: Sorted set of a tenant's sessions (score: created_at, in s).
tenant_sessions: Callable[[TenantId], str] = "cotrain:tenant:{}:sessions".format
#: Sorted set of a tenant's live sessions (score: end of life without a heartbeat, in ms).
living_sessions: Callable[[TenantId], str] = "cotrain:tenant:{}:living_sessions".format
#: Sorted set of a tenant's samplers (score: expiry without use, in ms).
tenant_samplers: Callable[[TenantId], str] = "cotrain:tenant:{}:samplers".format
#: Hash of weight sizes, and their sum, for samplers made by a save without a name. Deleted with the samplers.
sampler_bytes: Callable[[TenantId], str] = "cotrain:tenant:{}:sampler_bytes".format
#: Byte count of a tenant's records of sessions and runs, which are kept permanently.
record_bytes: Callable[[TenantId], str] = "cotrain:tenant:{}:record_bytes".format
#: Sorted set of a tenant's runs with a history (score: its newest point, in s).
#: The oldest histories are deleted when the quota of points is full.
histories: Callable[[TenantId], str] = "cotrain:tenant:{}:histories".format
#: Hash of a tenant's number of history points, and the quota when its newest run was made.
history_points: Callable[[TenantId], str] = "cotrain:tenant:{}:history".format
#: Sorted set of tenants (score: bytes that their runs hold); tenants at 0 are removed.
run_bytes: Callable[[], str] = "cotrain:tenants:run_bytes".format
#: Number of bytes that all runs may still write; kept permanently.
unwritten_run_bytes: Callable[[], str] = "cotrain:run_bytes:unwritten".format
#: Hash of one hour, `<amount>|<base model>|<session>|<run or sampler>` → value.
#: `hour` is its start, in s since the epoch. Amounts: training_tokens, device_s, prefill_tokens (the whole
#: prompt), cached_tokens (part of it), sampled_tokens, checkpoints. Expires (USAGE_TTL_S).
usage: Callable[[TenantId, int], str] = "cotrain:usage:{}:{}".format
#: Stream of changes of a tenant and its records; about the last 10,000 are kept.
audit: Callable[[TenantId], str] = "cotrain:audit:{}".format
#: Stream of the actions of all tenants and the operator; about the last 10,000 are kept.
audit_of_all: Callable[[], str] = "cotrain:audit".format
#: Lease timeout of the webhook sender.
LEASE_MS = 10_000

#: Hash of a tenant's webhook (id, url, secret, drift_above, outcomes of its events), until removed.
webhook: Callable[[TenantId], str] = "cotrain:tenant:{}:webhook".format
#: Hash event id → arrival (ms), attempts and body; a field is deleted with its event.
events: Callable[[TenantId], str] = "cotrain:tenant:{}:webhook_events".format
#: Sorted set of those events (score: next attempt, in ms of the store's clock).
due_events: Callable[[TenantId], str] = "cotrain:tenant:{}:webhook_due".format
#: Sorted set of tenants with events (score: when the first one is due, in ms).
due_tenants: Callable[[], str] = "cotrain:webhooks:due".format
#: Lease of the webhook sender; expires unless renewed.
lease: Callable[[], str] = "cotrain:webhooks:lease".format
#: Number of the newest webhook sender; kept permanently, only increases.
epoch: Callable[[], str] = "cotrain:webhooks:epoch".format


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
        hour = amounts.setdefault(usage(tenant_by_run[run], usage_hour(now_s)), {})
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
