"""Formats of the tables in docs/develop/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TENANTS = {
    "backend": "{}", "tenants": "{}", "length": "{}", "forwards": "{}", "wall_s": "{:.3f}", "cpu_s": "{:.3f}",
    "many_over_one": "{:.3f}", "many_over_one_cpu": "{:.3f}", "tokens_per_s": "{:,.0f}",
    "ceiling_tokens_per_s": "{:,.0f}", "of_ceiling": "{:.0%}",
}  # fmt: skip
BY_HAND = {
    "tenants": "{}", "length": "{}", "tokens_per_s": "{:,.0f}", "wall_s": "{:.3f}", "cpu_s": "{:.3f}",
    "loop_wall_s": "{:.3f}", "over_loop": "{:.2f}", "over_loop_cpu": "{:.2f}",
    "switch_wall_s": "{:.3f}", "mixed_wall_s": "{:.3f}", "over_mixed": "{:.2f}", "over_mixed_cpu": "{:.2f}",
}  # fmt: skip
MEMORY = {
    "per_adapter": "{:,.0f}", "ideal_per_adapter": "{:,.0f}", "saved_per_token": "{:,.0f}",
    "peak_per_token": "{:,.0f}", "ideal_per_token": "{:,.0f}",
}  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]], formats: Mapping[str, str]) -> str:
    """Return rows as a Markdown table; missing values are dashes."""
    lines = ["| " + " | ".join(formats) + " |", "|" + "--:|" * len(formats)]
    for row in rows:
        cells = [form.format(row[name]) if name in row else "-" for name, form in formats.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def phase_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return milliseconds by phase, one column per profiled row."""
    heads = [f"{row['backend']}, {row['tenants']} x {row['length']}" for row in rows]
    lines = ["| ms | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(rows)]
    for phase in rows[0]["ms"]:
        cells = [f"{row['ms'][phase]:.1f}" for row in rows]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    for name in ("wall_ms", "profiled_ms", "ops", "launches", "waits"):
        if name in rows[0]:
            lines.append(f"| {name} | " + " | ".join(f"{row[name]:.0f}" for row in rows) + " |")
    return "\n".join(lines)
