"""Runs as a list shows them: where each stands, and what it waits for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_server.ui.number_format import age, plural
from cotrain_store.messages.runs import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cotrain_store.messages.history import HistoryPoint
    from cotrain_store.messages.ids import TenantId
    from cotrain_store.messages.pauses import Pauses
    from cotrain_store.messages.runs import RunRecord
    from cotrain_store.tenants.run_list import RunPosition

#: What a list can be narrowed to, and the states that are meant.
STATES: Mapping[str, RunState] = {
    "live": RunState.LIVE,
    "ended": RunState.CLOSED,
    "failed": RunState.FAILED,
}
_WORDS: Mapping[RunState, tuple[str, str]] = {
    RunState.LIVE: ("idle", ""),
    RunState.CLOSED: ("ended", ""),
    RunState.FAILED: ("failed", "bad"),
}


def run_row(
    run: RunRecord,
    position: RunPosition,
    pauses: Pauses,
    names: Mapping[TenantId, str],
    now: float,
) -> dict[str, Any]:
    """Show one run in a list."""
    state, kind = state_of(run, position, pauses)
    return {
        "run": run.id,
        "tenant": run.tenant,
        "tenant_name": names.get(run.tenant, ""),
        "base_model": run.base_model,
        "rank": run.lora.rank,
        "label": label_of(run),
        "tags": run.tags,
        "state": state,
        "state_kind": kind,
        "waits": waits_for(run, position, pauses, now),
        "requests_waiting": max(0, position.accepted - position.done),
        "steps": position.newest.step if position.newest else 0,
        "last_loss": mean_loss(position.newest),
        "device_s": position.device_s,
        "created_at": run.created_at,
        "last_request_at": run.last_request_at,
    }


def state_of(run: RunRecord, position: RunPosition, pauses: Pauses) -> tuple[str, str]:
    """Say in a word how a run is, and which colour goes with it."""
    if run.state is RunState.LIVE and position.accepted > position.done:
        if pauses.notice(run.tenant, run.id):
            return "paused", "warn"
        return ("running", "ok") if position.planned > position.done else ("waiting", "info")
    return _WORDS[run.state]


def waits_for(run: RunRecord, position: RunPosition, pauses: Pauses, now: float) -> str:
    """Say in a sentence what a run waits for."""
    if run.state is RunState.CLOSED:
        return "Its client ended it."
    if run.state is RunState.FAILED:
        return "Stopped: a replay after a crash did not give the same numbers."
    left = position.accepted - position.done
    if left <= 0:
        return "All it asked for is done; it waits for its client."
    if pause := pauses.notice(run.tenant, run.id):
        return f"{pause[0].upper()}{pause[1:]}."
    in_cycle = position.planned - position.done
    if in_cycle > 0:
        rest = f"; {left - in_cycle:,} more wait" if left > in_cycle else ""
        return f"{plural(in_cycle, 'request')} in a cycle now{rest}."
    if position.gap_since_ms is not None and position.ready_since_ms is None:
        return (
            f"Request {position.planned + 1} never came; what follows it waits, "
            f"since {age(now - position.gap_since_ms / 1000)}."
        )
    return f"{plural(left, 'request')} for the next cycle with room."


def label_of(run: RunRecord) -> str:
    """Give the name that a tenant's program gave a run, if it gave one."""
    for field in ("name", "run_name", "display_name", "experiment"):
        if isinstance(value := run.user_metadata.get(field), str) and value.strip():
            return value[:120]
    return ""


def mean_loss(point: HistoryPoint | None) -> float | None:
    """Give the loss of a step per unit of weight; None where that is not known."""
    if point is None or not point.weight_sum:
        return None
    return point.loss_sum / point.weight_sum


def keeps(state: str, base_model: str, text: str) -> Callable[[RunRecord], bool] | None:
    """Make the test of a list that was narrowed down; None where everything is to be kept."""
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
