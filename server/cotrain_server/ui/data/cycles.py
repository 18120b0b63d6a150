"""Timeline of cycles, with their runs and phases. Pure.

A tenant is shown its own runs. All others in a cycle are one sum without names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Number of tenants with their own colour. All others share one.
COLOURS = 8
REST = "rest"
OTHERS = "other tenants"
_WIDTH = 1000.0
_LEAST_WIDTH = 1.5
_STACK_HEIGHT = 40.0
_PHASES = (("wave_ms", "f0", "passes"), ("sampling_ms", "f2", "sampling"), ("optim_ms", "f1", "optimizer"))


@dataclass(frozen=True)
class Eyes:
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


def timeline_of(records: Sequence[Mapping[str, Any]], eyes: Eyes) -> dict[str, Any]:
    """Return the timeline of cycles, newest first in `records`: a row per worker, and the colours of tenants."""
    colour = _colours(records, eyes)
    start, end = _span(records)
    workers = sorted({record["worker"] for record in records})
    rows = [
        {
            "worker": name if eyes.own is None else f"worker {number}",
            "bars": [
                _bar(record, eyes, colour, start, max(end - start, 1e-3))
                for record in reversed(records)
                if record["worker"] == name
            ],
        }
        for number, name in enumerate(workers, 1)
    ]
    totals = _totals(records, eyes)
    return {
        "start": start,
        "end": end,
        "rows": rows,
        "legend": [
            {"colour": colour[tenant], "tenant": _id(tenant, eyes), "name": eyes.name(tenant),
             "tokens": totals[tenant]}
            for tenant in sorted(totals, key=lambda tenant: (-totals[tenant], tenant))
            if colour[tenant] != REST
        ],
        "rest_tokens": sum(tokens for tenant, tokens in totals.items() if colour[tenant] == REST),
        "cycles": [cycle_of(record, eyes) for record in records],
    }  # fmt: skip


def cycle_of(record: Mapping[str, Any], eyes: Eyes) -> dict[str, Any]:
    """Return a summary of one cycle."""
    tokens, padded = record["tokens"], record.get("padded_tokens")
    seen = [run for run in record["runs"] if eyes.sees(run["tenant"])]
    ops: dict[str, int] = {}
    for run in seen:
        for kind, count in run["ops"].items():
            ops[kind] = ops.get(kind, 0) + count
    return {
        "cycle": record["cycle"],
        "started_at": record["started_at"],
        "waited_s": max(0.0, record["started_at"] - record["planned_at"]),
        "duration_s": record["duration_ms"] / 1000,
        "phases": {name: (record.get(key) or 0) / 1000 for key, _, name in _PHASES},
        "tokens": tokens,
        "own_tokens": sum(run["tokens"] for run in seen),
        "padding": (padded - tokens) / padded if padded else None,
        "forwards": record.get("forwards"),
        "runs": len(seen),
        "tenants": len({run["tenant"] for run in record["runs"]}),
        "ops": ops,
        "failed": sum(run["failed"] for run in seen),
        "outcome": record["outcome"],
        **({"worker": record["worker"]} if eyes.own is None else {}),
    }


def runs_of(record: Mapping[str, Any], eyes: Eyes) -> list[dict[str, Any]]:
    """Return the visible runs of a cycle."""
    return [
        {
            "run": run["run"],
            "tenant": run["tenant"],
            "tenant_name": eyes.name(run["tenant"]),
            "tokens": run["tokens"],
            "ops": run["ops"],
            "failed": run["failed"],
            "digests": run.get("digests", {}),
        }
        for run in sorted(record["runs"], key=lambda run: (-run["tokens"], run["run"]))
        if eyes.sees(run["tenant"])
    ]


def _id(tenant: str, eyes: Eyes) -> str:
    return tenant if eyes.sees(tenant) else ""


def _totals(records: Sequence[Mapping[str, Any]], eyes: Eyes) -> dict[str, int]:
    """Return the tokens by tenant. Hidden tenants are summed under an empty id."""
    totals: dict[str, int] = {}
    for record in records:
        for run in record["runs"]:
            key = _id(run["tenant"], eyes)
            totals[key] = totals.get(key, 0) + run["tokens"]
    return totals


def _colours(records: Sequence[Mapping[str, Any]], eyes: Eyes) -> dict[str, str]:
    """Return colours for the busiest tenants in the order of their ids, so that colours are stable."""
    totals = _totals(records, eyes)
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


def _bar(record: Mapping[str, Any], eyes: Eyes, colour: Mapping[str, str], start: float, span: float) -> dict[str, Any]:
    x = (record["started_at"] - start) / span * _WIDTH
    width = max(_LEAST_WIDTH, record["duration_ms"] / 1000 / span * _WIDTH)
    return {
        "cycle": record["cycle"],
        "x": round(x, 2),
        "width": round(width, 2),
        "stack": _stack(record, eyes, colour),
        "phases": _phases(record, x, width),
    }


def _stack(record: Mapping[str, Any], eyes: Eyes, colour: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return shares of a bar's height by tokens. Ops without tokens, such as a save, count as one."""
    share: dict[str, float] = {}
    for run in record["runs"]:
        key = _id(run["tenant"], eyes)
        share[key] = share.get(key, 0) + max(1, run["tokens"])
    by_colour: dict[str, float] = {}
    for key, amount in share.items():
        by_colour[colour[key]] = by_colour.get(colour[key], 0) + amount
    total, y, stack = sum(share.values()) or 1, 0.0, []
    for name in sorted(by_colour, key=lambda name: (name == REST, name)):
        height = by_colour[name] / total * _STACK_HEIGHT
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
