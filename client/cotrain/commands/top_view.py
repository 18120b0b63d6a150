"""How `cotrain top` looks."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain.wire.status import CycleRecord, PoolStatus, ServerStatus, TenantStatus

CYCLES_SHOWN = 10


def view(status: ServerStatus) -> RenderableType:
    """Draw all of it, a part below another."""
    parts: list[RenderableType] = [_headline(status)]
    for pool in status.pools:
        parts += [Text(), _pool(pool)]
        if pool.tenants:
            parts += [Text(), _tenants(pool.tenants)]
        if pool.cycles:
            parts += [Text(), _cycles(pool.cycles[:CYCLES_SHOWN])]
    return Group(*parts)


def tokens_per_s(cycles: Sequence[CycleRecord]) -> float:
    """Say how many tokens a second went through these cycles, pauses between them included."""
    if not cycles:
        return 0.0
    started = min(cycle.started_at for cycle in cycles)
    ended = max(cycle.started_at + cycle.duration_ms / 1000 for cycle in cycles)
    return sum(cycle.tokens for cycle in cycles) / max(ended - started, 1e-3)


def _headline(status: ServerStatus) -> Text:
    line = Text(f"cotrain {status.version}", style="bold")
    if status.uptime_s is not None:
        line.append(f"  up {_duration(status.uptime_s)}", style="not bold")
    if status.ready:
        line.append("  ready", "green")
    elif status.ready is not None:
        line.append(f"  not ready{': ' if status.reasons else ''}", "red")
        line.append(" ".join(status.reasons), "not bold")
    return line


def _workers(pool: PoolStatus) -> str:
    """Count them; those that do not simply serve are named by their state, groups by their size."""
    if isinstance(pool.workers, int):
        return str(pool.workers)
    states = Counter(worker.state for worker in pool.workers if worker.state != "serving")
    sizes = {len(worker.members) for worker in pool.workers if worker.members}
    count = str(len(pool.workers))
    if sizes:
        count = f"{count} (groups of {'/'.join(map(str, sorted(sizes)))})"
    return ", ".join([count, *(f"{n} {state}" for state, n in states.items())])


def _pool(pool: PoolStatus) -> Table:
    table = Table(
        *("base model", "workers", "cycle", "open", "queued ops", "tokens", "oldest"),
        *("sampling", "waiting", "tokens/s", "busy"),
        box=None,
    )
    table.add_row(
        Text(pool.base_model, style="bold"),
        _workers(pool),
        str(pool.last_cycle),
        str(pool.open_cycles),
        f"{pool.queue.ops:,}",
        f"{pool.queue.tokens:,}",
        f"{pool.queue.oldest_s:.1f} s",
        f"{pool.samples.running:,}",
        f"{pool.samples.waiting:,}",
        f"{tokens_per_s(pool.cycles):,.0f}" if pool.cycles else "",
        f"{1 - pool.duty.get('idle', 0.0):.0%}" if pool.duty else "",
    )
    return table


def _tenants(tenants: Sequence[TenantStatus]) -> Table:
    table = Table("tenant", "name", "ops", "tokens", "size", "sampling", "waiting", box=None)
    for each in sorted(tenants, key=lambda each: (-each.tokens, each.tenant)):
        table.add_row(
            each.tenant,
            each.tenant_name,
            f"{each.ops:,}",
            f"{each.tokens:,}",
            decimal(each.bytes),
            f"{each.samples_running:,}",
            f"{each.samples_waiting:,}",
        )
    return table


def _cycles(cycles: Sequence[CycleRecord]) -> Table:
    table = Table("cycle", "started", "took", "tokens", "runs", "ops", "worker", "", box=None)
    for each in cycles:
        ops: dict[str, int] = {}
        for run in each.runs:
            for kind, count in run.ops.items():
                ops[kind] = ops.get(kind, 0) + count
        table.add_row(
            str(each.cycle),
            f"{datetime.fromtimestamp(each.started_at, UTC):%H:%M:%S}",
            f"{each.duration_ms:,.0f} ms",
            f"{each.tokens:,}",
            str(len(each.runs)),
            " ".join(f"{count} {kind}" for kind, count in sorted(ops.items())),
            each.worker,
            "" if each.outcome == "ok" else Text(each.outcome, style="red"),
        )
    return table


def _duration(seconds: float) -> str:
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    clock = f"{hours_left:02}:{minutes_left:02}:{seconds_left:02}"
    return f"{days} d {clock}" if days else clock
