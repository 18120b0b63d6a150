"""The waits beside each neighbour as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw p99 alone, beside and promised, a panel for each probe; return whether it could."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    probes = list(dict.fromkeys(row["probe"] for row in rows))
    names = list(dict.fromkeys(row["neighbour"] for row in rows))
    figure, axes = pyplot.subplots(
        1,
        len(probes),
        figsize=(5 * len(probes), 1.5 + 0.35 * len(names)),
        sharey=True,
        squeeze=False,
    )
    for axis, probe in zip(axes[0], probes, strict=True):
        own = [row for row in rows if row["probe"] == probe]
        at = range(len(own))
        axis.barh(
            at, [row["beside"]["p99_s"] for row in own], color="tab:blue", label="beside, p99"
        )
        axis.scatter([row["alone"]["p99_s"] for row in own], at, color="black", label="alone, p99")
        promised = [row["promised_p99_s"] for row in own]
        axis.scatter(promised, at, color="tab:red", marker="|", s=200, label="promised")
        axis.set(title=probe, xscale="log", xlabel="s", yticks=list(at))
        axis.set_yticklabels([row["neighbour"] for row in own])
        axis.invert_yaxis()
    axes[0][0].legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
