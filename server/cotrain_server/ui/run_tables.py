"""Tables of runs, of a run's requests, and of a worker's busiest runs. Pure.

The tables show the state of each run and request, its waiting time, and the workers to which a run can move.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cotrain.wire.admin import WorkerShown
from cotrain.wire.rest import WaitCause
from cotrain_server.views.records import mean_loss
from cotrain_server.views.waiting import Found
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.messages.ops import OpKind, ResultKind
from cotrain_store.messages.runs import RunRecord, RunState
from cotrain_store.monitoring.recent_activity import LoggedOp
from cotrain_store.tenants.run_list import RunPosition

#: Filters of a list, and the states that they select.
STATES: Mapping[str, RunState] = {"live": RunState.LIVE, "ended": RunState.CLOSED, "failed": RunState.FAILED}
#: State of a run in a word or two, and its colour, by the cause for which it waits.
_WORDS: Mapping[WaitCause, tuple[str, str]] = {
    "ended": ("ended", ""),
    "failed": ("failed", "bad"),
    "idle": ("idle", ""),
    "paused": ("paused", "warn"),
    "no_worker": ("no worker", "bad"),
    "restarting": ("no worker", "bad"),
    "running": ("running", "ok"),
    "large_pass": ("running", "ok"),
}


def run_row(run: RunRecord, position: RunPosition, found: Found, tenant_name: str) -> dict[str, Any]:
    """Return the row of one run, which waits for the cause `found` of `brief_why`."""
    cause, waits = found
    state, kind = _WORDS.get(cause, ("waiting", "info"))
    return {
        "run": run.id,
        "tenant": run.tenant,
        "tenant_name": tenant_name,
        "base_model": run.base_model,
        "rank": run.lora.rank,
        "label": label_of(run),
        "tags": run.tags,
        "state": state,
        "state_kind": kind,
        "waits": waits,
        "short_id": short_id(run.id),
        "requests_waiting": max(0, position.accepted - position.done),
        "failed": position.failed,
        "steps": position.newest.step if position.newest else 0,
        "last_loss": mean_loss(position.newest),
        "device_s": position.device_s,
        "created_at": run.created_at,
        "last_request_at": run.last_request_at,
    }


def short_id(run: RunId) -> str:
    """Return a short form of a run's id: the start of its session's id, and its number."""
    session, _, number = run.partition(":train:")
    return f"{session[:6]}…:{number}"


def label_of(run: RunRecord) -> str:
    """Return the name that a tenant's program gave a run, or ""."""
    for field in ("name", "run_name", "display_name", "experiment"):
        if isinstance(value := run.user_metadata.get(field), str) and value.strip():
            return value[:120]
    return ""


def keeps(state: str, base_model: str, text: str) -> Callable[[RunRecord], bool] | None:
    """Return the predicate of a filtered list, or None without filters."""
    wanted, needle = STATES.get(state), text.strip().lower()
    if wanted is None and not base_model and not needle:
        return None

    def keep(run: RunRecord) -> bool:
        if wanted is not None and run.state is not wanted:
            return False
        if base_model and run.base_model != base_model:
            return False
        given = (value for value in run.user_metadata.values() if isinstance(value, str))
        values = (run.id, run.note, *run.tags, *given)
        return not needle or any(needle in value.lower() for value in values)

    return keep


def log_rows(
    ops: Sequence[LoggedOp], cycles: Sequence[Mapping[str, Any]], run: str, planned: int, done: int
) -> list[dict[str, Any]]:
    """Return the rows of ops, newest first. `cycles` are the last cycle records of the pool."""
    cycle_by_seq = _cycle_by_seq(cycles, run)
    return [_row(op, cycle_by_seq.get(op.seq), planned, done) for op in reversed(ops)]


def _cycle_by_seq(cycles: Sequence[Mapping[str, Any]], run: str) -> dict[int, Mapping[str, Any]]:
    """Return the cycle in which each op of a run ended, by the digests in the records.

    It contains the op's `shared_tokens` besides the record.
    """
    return {
        int(seq): {**record, "shared_tokens": part.get("shared", {}).get(seq, 0)}
        for record in cycles
        for part in record["runs"]
        if part["run"] == run
        for seq in part.get("digests", {})
    }


def _row(op: LoggedOp, cycle: Mapping[str, Any] | None, planned: int, done: int) -> dict[str, Any]:
    started = cycle["started_at"] if cycle else None
    state, kind = _state(op, planned, done)
    return {
        "seq": op.seq,
        "op": "refused request" if op.kind == OpKind.REJECTED else op.kind,
        "tokens": op.tokens,
        "shared": cycle["shared_tokens"] / op.tokens if cycle and op.tokens else 0.0,
        "state": state,
        "state_kind": kind,
        "accepted_at": op.accepted_at,
        "waited_s": max(0.0, started - op.accepted_at) if started and op.accepted_at else None,
        "cycle": cycle["cycle"] if cycle else None,
        "took_s": cycle["duration_ms"] / 1000 if cycle else None,
        "error": op.error,
    }


def _state(op: LoggedOp, planned: int, done: int) -> tuple[str, str]:
    if op.result is ResultKind.FAILURE:
        return "failed", "bad"
    if op.seq <= done:
        return "done", "ok"
    if op.kind == OpKind.REJECTED:
        return "refused", "bad"
    if op.kind == "":
        return "missing", "warn"
    return ("in a cycle", "info") if op.seq <= planned else ("waiting", "")


#: Number of runs shown per worker.
BUSIEST_SHOWN = 5


def tokens_of_runs(cycles: Iterable[Mapping[str, Any]]) -> dict[RunId, tuple[str, int]]:
    """Return the tenant and tokens of each run in these cycles, the most tokens first."""
    tenants: dict[RunId, str] = {}
    tokens: Counter[RunId] = Counter()
    for cycle in cycles:
        for each in cycle["runs"]:
            run = RunId(each["run"])
            tenants[run] = each["tenant"]
            tokens[run] += each["tokens"]
    return {run: (tenants[run], count) for run, count in tokens.most_common()}


def busiest(
    tokens: Mapping[RunId, tuple[str, int]], owners: Mapping[RunId, WorkerId]
) -> dict[WorkerId, list[dict[str, Any]]]:
    """Return the runs of each worker with the most tokens."""
    found: defaultdict[WorkerId, list[dict[str, Any]]] = defaultdict(list)
    for run, (tenant, count) in tokens.items():
        if run in owners and len(found[owners[run]]) < BUSIEST_SHOWN:
            found[owners[run]].append({"run": run, "tenant": tenant, "tokens": count})
    return dict(found)


def targets_of(worker: WorkerShown, workers: Sequence[WorkerShown]) -> list[str]:
    """Return the workers to which a run of this worker can move."""
    return [
        each.id for each in workers if each.pool == worker.pool and each.id != worker.id and each.state == "serving"
    ]
