"""Picture of the figures of each model size, if matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(report: dict[str, Any], path: Path) -> bool:
    """Draw tokens/s and phases of every size; return False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = report["sizes"]
    figure, axes = pyplot.subplots(len(sizes), 2, figsize=(12, 4.5 * len(sizes)), squeeze=False)
    for (left, right), (size, parts) in zip(axes, sizes.items(), strict=True):
        draw_speed(left, size, parts)
        draw_phases(right, parts)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def draw_speed(axis: Any, size: str, parts: dict[str, Any]) -> None:
    """Draw tokens/s over tenants, next to PEFT and the ceiling of the machine."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in parts.get("tenants", []):
        name = f"{row['backend']}, {row['length']} tokens"
        lines.setdefault(name, []).append((row["tenants"], row["tokens_per_s"]))
        ceiling = f"ceiling, {row['length']} tokens"
        lines.setdefault(ceiling, []).append((row["tenants"], row["ceiling_tokens_per_s"]))
    for row in parts.get("by_hand", []):
        for way in ("loop", "mixed"):
            if f"{way}_wall_s" in row:
                speed = row["tokens"] / row[f"{way}_wall_s"]
                lines.setdefault(f"PEFT {way}", []).append((row["tenants"], speed))
    for name, points in lines.items():
        style = "--" if name.startswith("ceiling") else "o-"
        axis.plot(*zip(*sorted(set(points)), strict=True), style, label=name)
    axis.set(title=size, xlabel="tenants", ylabel="tokens/s", xscale="log", ylim=(0, None))
    if lines:
        axis.legend(fontsize="small")


def draw_phases(axis: Any, parts: dict[str, Any]) -> None:
    """Draw the milliseconds of each profiled cycle as a stack of phases."""
    rows = parts.get("phases", [])
    bottoms = [0.0] * len(rows)
    names = [f"{row['backend']}\n{row['tenants']} x {row['length']}" for row in rows]
    for phase in rows[0]["ms"] if rows else ():
        heights = [row["ms"][phase] for row in rows]
        axis.bar(names, heights, bottom=bottoms, label=phase)
        bottoms = [low + more for low, more in zip(bottoms, heights, strict=True)]
    axis.set(title="a cycle by phase", xlabel="tenants x tokens a sequence", ylabel="ms")
    if rows:
        axis.legend(fontsize="small")
