"""Pages of cycles: a timeline of the work of each worker, by tenant, with runs and phases.

A tenant is shown its own runs. All others in a cycle are one sum without names.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cotrain_server.errors import Invalid
from cotrain_server.ui.page import Page, PageRequest
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import PoolId, TenantId
from cotrain_store.monitoring.recent_activity import cycle_record, cycle_records
from cotrain_store.tenants.catalog import tenant_names

CHOICES = (20, 40, 100)
#: Number of tenants with their own colour. All others share one.
COLOURS = 8
REST = "rest"
OTHERS = "other tenants"
_WIDTH = 1000.0
_LEAST_WIDTH = 1.5
_STACK_HEIGHT = 40.0
_PHASES = (("wave_ms", "f0", "passes"), ("sampling_ms", "f2", "sampling"), ("optim_ms", "f1", "optimizer"))


@dataclass(frozen=True)
class Viewer:
    """Viewer of a cycle: the operator, with the names of tenants, or one tenant."""

    own: str | None  # None for the operator
    names: Mapping[str, str] = field(default_factory=dict)

    def sees(self, tenant: str) -> bool:
        """Return True if a tenant's part is shown individually."""
        return self.own is None or tenant == self.own

    def name(self, tenant: str) -> str:
        """Return the display name of a tenant."""
        if not self.sees(tenant):
            return OTHERS
        return self.names.get(tenant) or tenant


@partial(Page, "/ui/cycles", "Cycles", "cycles.html", poll_s=4)
async def cycles(request: PageRequest) -> dict[str, Any]:
    """Return the data of the last cycles of one pool."""
    pools = await request.services.records.pools()
    count = _chosen_count(request.query.get("last", ""))
    named = (pool for pool in pools if pool.id == request.query.get("pool", ""))
    pool = next(named, pools[0] if pools else None)
    found: dict[str, Any] = {
        "pools": [{"id": each.id, "base_model": each.base_model} for each in pools],
        "pool": pool.id if pool else "",
        "last": count,
        "choices": CHOICES,
        "timeline": None,
    }
    if pool is None:
        return found
    records = await cycle_records(request.services.connection, pool.id, count)
    return {**found, "timeline": timeline_of(records, await _viewer(request, records))}


@partial(Page, "/ui/cycles/{pool}/{cycle}", "Cycle", "cycle.html", in_navigation=False)
async def one_cycle(request: PageRequest) -> dict[str, Any]:
    """Return the data of one cycle."""
    pool, number = PoolId(request.parts["pool"]), request.parts["cycle"]
    known = {each.id: each for each in await request.services.records.pools()}
    if pool not in known or not number.isdecimal() or len(number) > 15:
        raise Refused(Reason.CYCLE_NOT_KEPT)
    record = await cycle_record(request.services.connection, pool, int(number))
    if record is None:
        raise Refused(Reason.CYCLE_NOT_KEPT)
    viewer = await _viewer(request, [record])
    return {
        "pool": pool,
        "base_model": known[pool].base_model,
        "cycle": cycle_of(record, viewer),
        "runs": runs_of(record, viewer),
    }


def _chosen_count(wanted: str) -> int:
    """Return the requested number of cycles. Raises Invalid."""
    if not wanted:
        return CHOICES[1]
    if not wanted.isdecimal() or int(wanted) not in CHOICES:
        raise Invalid(f"last must be one of {', '.join(map(str, CHOICES))}.")
    return int(wanted)


async def _viewer(request: PageRequest, records: Sequence[dict[str, Any]]) -> Viewer:
    if tenant := request.visitor.tenant:
        return Viewer(tenant.id, {tenant.id: "you"})
    ids = {TenantId(run["tenant"]) for record in records for run in record["runs"]}
    names = await tenant_names(request.services.connection, ids)
    return Viewer(None, {str(tenant): name for tenant, name in names.items()})


def timeline_of(records: Sequence[Mapping[str, Any]], viewer: Viewer) -> dict[str, Any]:
    """Return the timeline of cycles, newest first in `records`: a row per worker, and the colours of tenants."""
    colour = _colours(records, viewer)
    start, end = _span(records)
    workers = sorted({record["worker"] for record in records})
    rows = [
        {
            "worker": name if viewer.own is None else f"worker {number}",
            "bars": [
                _bar(record, viewer, colour, start, max(end - start, 1e-3))
                for record in reversed(records)
                if record["worker"] == name
            ],
        }
        for number, name in enumerate(workers, 1)
    ]
    totals = _totals(records, viewer)
    return {
        "start": start,
        "end": end,
        "rows": rows,
        "legend": [
            {"colour": colour[tenant], "tenant": _id(tenant, viewer), "name": viewer.name(tenant),
             "tokens": totals[tenant]}
            for tenant in sorted(totals, key=lambda tenant: (-totals[tenant], tenant))
            if colour[tenant] != REST
        ],
        "rest_tokens": sum(tokens for tenant, tokens in totals.items() if colour[tenant] == REST),
        "cycles": [cycle_of(record, viewer) for record in records],
    }  # fmt: skip


def cycle_of(record: Mapping[str, Any], viewer: Viewer) -> dict[str, Any]:
    """Return a summary of one cycle."""
    computed, padded = record.get("computed_tokens"), record.get("padded_tokens")
    seen = [run for run in record["runs"] if viewer.sees(run["tenant"])]
    ops: Counter[str] = Counter()
    for run in seen:
        ops.update(run["ops"])
    return {
        "cycle": record["cycle"],
        "started_at": record["started_at"],
        "waited_s": max(0.0, record["started_at"] - record["planned_at"]),
        "duration_s": record["duration_ms"] / 1000,
        "phases": {name: (record.get(key) or 0) / 1000 for key, _, name in _PHASES},
        "tokens": record["tokens"],
        "own_tokens": sum(run["tokens"] for run in seen),
        "padding": (padded - computed) / padded if padded and computed is not None else None,
        "forwards": record.get("forwards"),
        "runs": len(seen),
        "tenants": len({run["tenant"] for run in record["runs"]}),
        "ops": dict(ops),
        "failed": sum(run["failed"] for run in seen),
        "outcome": record["outcome"],
        **({"worker": record["worker"]} if viewer.own is None else {}),
    }


def runs_of(record: Mapping[str, Any], viewer: Viewer) -> list[dict[str, Any]]:
    """Return the visible runs of a cycle."""
    return [
        {
            "run": run["run"],
            "tenant": run["tenant"],
            "tenant_name": viewer.name(run["tenant"]),
            "tokens": run["tokens"],
            "ops": run["ops"],
            "failed": run["failed"],
            "digests": run.get("digests", {}),
        }
        for run in sorted(record["runs"], key=lambda run: (-run["tokens"], run["run"]))
        if viewer.sees(run["tenant"])
    ]


def _id(tenant: str, viewer: Viewer) -> str:
    return tenant if viewer.sees(tenant) else ""


def _totals(records: Sequence[Mapping[str, Any]], viewer: Viewer) -> dict[str, int]:
    """Return the tokens by tenant. Hidden tenants are summed under an empty id."""
    totals: Counter[str] = Counter()
    for record in records:
        for run in record["runs"]:
            totals[_id(run["tenant"], viewer)] += run["tokens"]
    return totals


def _colours(records: Sequence[Mapping[str, Any]], viewer: Viewer) -> dict[str, str]:
    """Return colours for the busiest tenants in the order of their ids, so that colours are stable."""
    totals = _totals(records, viewer)
    named = sorted((key for key in totals if key), key=lambda key: (-totals[key], key))
    colour = {key: f"s{number}" for number, key in enumerate(sorted(named[:COLOURS]))}
    return {key: colour.get(key, REST) for key in totals}


def _span(records: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    if not records:
        return 0.0, 0.0
    return (
        min(record["started_at"] for record in records),
        max(record["started_at"] + record["duration_ms"] / 1000 for record in records),
    )


def _bar(
    record: Mapping[str, Any], viewer: Viewer, colour: Mapping[str, str], start: float, span: float
) -> dict[str, Any]:
    x = (record["started_at"] - start) / span * _WIDTH
    width = max(_LEAST_WIDTH, record["duration_ms"] / 1000 / span * _WIDTH)
    return {
        "cycle": record["cycle"],
        "x": round(x, 2),
        "width": round(width, 2),
        "stack": _stack(record, viewer, colour),
        "phases": _phases(record, x, width),
    }


def _stack(record: Mapping[str, Any], viewer: Viewer, colour: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return shares of a bar's height by tokens. Ops without tokens, such as a save, count as one."""
    shares: Counter[str] = Counter()
    for run in record["runs"]:
        shares[colour[_id(run["tenant"], viewer)]] += max(1, run["tokens"])
    y, stack = 0.0, []
    for name in sorted(shares, key=lambda name: (name == REST, name)):
        height = shares[name] / shares.total() * _STACK_HEIGHT
        stack.append({"colour": name, "y": round(y, 2), "height": round(height, 2)})
        y += height
    return stack


def _phases(record: Mapping[str, Any], x: float, width: float) -> list[dict[str, Any]]:
    phases = []
    for key, name, what in _PHASES:
        part = (record.get(key) or 0) / record["duration_ms"] if record["duration_ms"] else 0
        if part:
            phases.append({"colour": name, "what": what, "x": round(x, 2), "width": round(part * width, 2)})
            x += part * width
    return phases
