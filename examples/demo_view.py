"""Output of the demo: live tables, the matrix of adapters and texts, costs of the loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from demo_clock import Cost
from demo_rl import STEPS as RL_STEPS
from demo_rl import Learning
from demo_tenants import STEPS, TENANTS, Progress
from demo_texts import TENANT_KINDS
from rich.markup import escape
from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"


def training_table(progress: Sequence[Progress]) -> Table:
    """Show the progress of every tenant."""
    table = Table(title="Four tenants, one base model, one pass per cycle")
    for column in ("tenant", "text", "rank", "trains", "loss"):
        table.add_column(column)
    for column in ("step", "nats/token", "cycle", "tokens/s"):
        table.add_column(column, justify="right")
    for tenant, now in zip(TENANTS, progress, strict=True):
        table.add_row(
            tenant.name,
            tenant.kind,
            str(tenant.rank),
            tenant.trains,
            tenant.loss,
            f"{now.step}/{STEPS}",
            f"{now.loss:.3f}" if now.step else "",
            str(now.cycle or ""),
            f"{now.tokens_per_s:,.0f}" if now.step else "",
        )
    return table


def matrix_table(progress: Sequence[Progress]) -> Table:
    """Show the loss of every adapter on every held-out text; green is the best adapter for a text."""
    table = Table(title="Loss on text that no tenant trained on, in nats per token")
    table.add_column("adapter")
    for kind in TENANT_KINDS:
        table.add_column(kind, justify="right")
    table.add_row("none: the base model", *(f"{progress[0].before[kind]:.3f}" for kind in TENANT_KINDS))
    table.add_section()
    for tenant, its in zip(TENANTS, progress, strict=True):
        cells = (_cell(its, kind, progress) for kind in TENANT_KINDS)
        table.add_row(f"{tenant.name}'s, of {tenant.kind}", *cells)
    return table


def loops_table(costs: Mapping[str, Cost], period_s: float) -> Table:
    """Show the cost of a step for each way to write the loop."""
    table = Table(title=f"One training step under a metronome of {period_s:g} s")
    table.add_column("loop")
    table.add_column("cycles", justify="right")
    table.add_column("seconds", justify="right")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.cycles:.1f}", f"{cost.seconds:.2f}")
    return table


def learning_table(learning: Learning) -> Table:
    """Show the policy's reward as a bar per step, and an answer of the last step."""
    table = Table(title="One policy, trained on nothing but how good its answers were", min_width=72)
    for column in ("step", "mean reward", "by step", "an answer"):
        table.add_column(column)
    latest = learning.rewards[-1] if learning.rewards else 0.0
    bars = "".join(BARS[min(int(reward * len(BARS)), len(BARS) - 1)] for reward in learning.rewards)
    step = f"{len(learning.rewards)}/{RL_STEPS}"
    table.add_row(step, f"{latest:.2f}", bars.ljust(RL_STEPS), escape(learning.latest))
    return table


def _cell(its: Progress, kind: str, all_progress: Sequence[Progress]) -> str:
    loss = its.after[kind]
    text = f"{loss:.3f} ({loss - its.before[kind]:+.3f})"
    is_best = loss == min(other.after[kind] for other in all_progress)
    return f"[bold green]{text}[/]" if is_best else text
