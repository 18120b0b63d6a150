"""Command `cotrain top`: live view of pools, cycles, queues and tenants."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cotrain.commands.terminal import (
    DEFAULT_DATA_DIR,
    NO_ADMIN_KEY,
    AsJson,
    BaseUrl,
    DataDir,
    Harmless,
    checked,
    examples,
    failing_in_a_sentence,
    harmless,
    plain_http,
    print_json,
    print_rich,
    stored_admin_key,
    table,
)
from cotrain.errors import InternalServerError
from cotrain.settings import DEFAULT_BASE_URL, ClientSettings, checked_url
from cotrain.transport.responses import parsed, reader
from cotrain.wire.admin import CycleRecord, PoolStatus, ServerStatus, TenantStatus

EXAMPLES = examples("cotrain top", "COTRAIN_ADMIN_KEY=… cotrain top", "cotrain top --once --json | jq .pools")
TIMEOUT_S = 10.0
CYCLES_SHOWN = 10


def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit, for scripts.")] = False,
    all_tenants: Annotated[
        bool, typer.Option("--all", help="As the operator on the server's host: its data folder has the key.")
    ] = False,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    admin_key: Annotated[str, typer.Option(envvar="COTRAIN_ADMIN_KEY", help="The operator's key: all tenants.")] = "",
    api_key: Annotated[str, typer.Option(envvar="COTRAIN_API_KEY", help="Without the operator's: your own part.")] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Watch pools, cycles, queues and tenants; Ctrl-C ends it. With --json: print one snapshot."""
    with failing_in_a_sentence():
        url = checked_url(base_url)
        key = admin_key or ("" if all_tenants else api_key) or stored_admin_key(url, data_dir)
        if not key:
            raise ValueError(NO_ADMIN_KEY if all_tenants else f"An API key is needed: COTRAIN_API_KEY. {NO_ADMIN_KEY}")
        with plain_http(ClientSettings(url, key)) as http:
            if as_json:
                print_json(_fetch_status(http))
            elif once or not sys.stdout.isatty():
                print_rich(view(_fetch_status(http)))
            else:
                _watch(http, every)


def _watch(http: httpx.Client, every_s: float) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    first = Harmless(view(_fetch_status(http)))
    with suppress(KeyboardInterrupt), Live(first, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            time.sleep(every_s)
            try:
                live.update(Harmless(view(_fetch_status(http))))
            except (httpx.TransportError, InternalServerError) as error:
                # It may be restarting.
                live.update(harmless(f"{http.base_url} does not answer: {error}"))


def _fetch_status(http: httpx.Client) -> ServerStatus:
    """Fetch the status. Raises APIError, or MalformedMessage if the response is none."""
    answer = checked(http.get("/status", timeout=TIMEOUT_S))
    return parsed(answer, reader(ServerStatus))


def view(status: ServerStatus) -> RenderableType:
    """Return the view of all parts, one below the other."""
    parts: list[RenderableType] = [_headline(status)]
    for pool in status.pools:
        parts += [Text(), _pool(pool)]
        if pool.tenants:
            parts += [Text(), _tenants(pool.tenants)]
        if pool.cycles:
            parts += [Text(), _cycles(pool.cycles[:CYCLES_SHOWN])]
    return Group(*parts)


def tokens_per_s(cycles: Sequence[CycleRecord]) -> float:
    """Return the throughput over these cycles, pauses between them included."""
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
    """Return the number of workers, with the states other than serving and the sizes of groups."""
    if isinstance(pool.workers, int):
        return str(pool.workers)
    states = Counter(worker.state for worker in pool.workers if worker.state != "serving")
    sizes = {len(worker.members) for worker in pool.workers if worker.members}
    count = str(len(pool.workers))
    if sizes:
        count = f"{count} (groups of {'/'.join(map(str, sorted(sizes)))})"
    restoring = [f"{w.id} restoring: {w.restoring.text}" for w in pool.workers if w.restoring]
    missing = [f"{name} unavailable" for name in pool.workers_unavailable]
    return ", ".join([count, *(f"{n} {state}" for state, n in states.items()), *restoring, *missing])


def _pool(pool: PoolStatus) -> Table:
    columns = (
        *("base model", "workers", "cycle", "open", "queued ops", "tokens", "oldest"),
        *("sampling", "waiting", "tokens/s", "busy"),
    )
    row = (
        Text(pool.base_model, style="bold"),
        _workers(pool),
        pool.last_cycle,
        pool.open_cycles,
        f"{pool.queue.ops:,}",
        f"{pool.queue.tokens:,}",
        f"{pool.queue.oldest_s:.1f} s",
        f"{pool.samples.running:,}",
        f"{pool.samples.waiting:,}",
        f"{tokens_per_s(pool.cycles):,.0f}" if pool.cycles else None,
        f"{1 - pool.duty.get('idle', 0.0):.0%}" if pool.duty else None,
    )
    return table(columns, [row])


def _tenants(tenants: Sequence[TenantStatus]) -> Table:
    return table(
        ("tenant", "name", "ops", "tokens", "size", "sampling", "waiting"),
        (
            (
                each.tenant,
                each.tenant_name,
                f"{each.ops:,}",
                f"{each.tokens:,}",
                decimal(each.bytes),
                f"{each.samples_running:,}",
                f"{each.samples_waiting:,}",
            )
            for each in sorted(tenants, key=lambda each: (-each.tokens, each.tenant))
        ),
    )


def _cycles(cycles: Sequence[CycleRecord]) -> Table:
    columns = ("cycle", "started", "took", "tokens", "runs", "ops", "worker", "")
    return table(columns, map(_cycle, cycles))


def _cycle(cycle: CycleRecord) -> Sequence[object]:
    ops: Counter[str] = Counter()
    for run in cycle.runs:
        ops.update(run.ops)
    return (
        cycle.cycle,
        f"{datetime.fromtimestamp(cycle.started_at, UTC):%H:%M:%S}",
        f"{cycle.duration_ms:,.0f} ms",
        f"{cycle.tokens:,}",
        len(cycle.runs),
        " ".join(f"{count} {kind}" for kind, count in sorted(ops.items())),
        cycle.worker,
        None if cycle.outcome == "ok" else Text(cycle.outcome, style="red"),
    )


def _duration(seconds: float) -> str:
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    clock = f"{hours_left:02}:{minutes_left:02}:{seconds_left:02}"
    return f"{days} d {clock}" if days else clock
