"""Writer of the rows in docs/reference/metrics.md, from the definitions of the metrics.

`make pages` writes them. A new metric needs a place first: a row that begins with its name, in the table of its process.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"^\| `(cotrain_\w+)` \|.*\n", re.MULTILINE)


def with_metrics(page: str) -> str:
    """Return the page with each row of a metric written anew. A row without a metric is removed.

    Raises ValueError for metrics without a row.
    """
    from cotrain_store.monitoring.definitions import METRICS

    def row(found: re.Match[str]) -> str:
        metric = METRICS.get(found[1])
        if metric is None:
            return ""
        labels = ", ".join(metric.labels)
        text = f"*Histogram.* {metric.help}" if metric.kind == "histogram" else metric.help
        return f"| `{metric.name}` | {labels} | {text} |\n"

    if missing := METRICS.keys() - set(ROW.findall(page)):
        rows = "\n".join(f"| `{name}` | | |" for name in sorted(missing))
        raise ValueError(f"{PAGE.name} needs a row for each of these metrics:\n{rows}")
    return ROW.sub(row, page)


def main() -> None:
    """Write the page where it differs."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("client", "scheduler")]
    PAGE.write_text(with_metrics(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
