"""Write the boards as Grafana reads them, and the alerts as Prometheus does: `python -m` this, or `make boards`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrain_store.monitoring.boards.alerts import ALERTS, PAGE
from cotrain_store.monitoring.boards.panels import BOARDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.monitoring.boards.alerts import Alert
    from cotrain_store.monitoring.boards.panels import Board, Panel

FOLDER = Path(__file__).parents[4] / "docker" / "observe"
#: Grafana chooses it by the width of a chart and the time between two scrapes.
RANGE = "$__rate_interval"
SOURCE = {"type": "prometheus", "uid": "cotrain"}
_COLUMNS, _HEIGHT, _NUMBERS_HEIGHT = 24, 8, 4


def files() -> Mapping[Path, str]:
    """Return all files by their name below `FOLDER`."""
    boards = {
        Path("grafana/boards") / f"{board.uid}.json": json.dumps(board_of(board), indent=1) + "\n"
        for board in BOARDS
    }
    return {Path("rules.yml"): rules(), **boards}


def board_of(board: Board) -> dict[str, Any]:
    """Return a board: numbers in rows of four, charts in rows of two."""
    numbers = [panel for panel in board.panels if panel.is_number]
    charts = [panel for panel in board.panels if not panel.is_number]
    below = -(-len(numbers) // 4) * _NUMBERS_HEIGHT
    panels = [
        _panel(panel, at, 4, 0, _NUMBERS_HEIGHT) for at, panel in enumerate(numbers)
    ] + [_panel(panel, at, 2, below, _HEIGHT) for at, panel in enumerate(charts)]  # fmt: skip
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["cotrain"],
        "editable": False,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _panel(panel: Panel, at: int, columns: int, top: int, height: int) -> dict[str, Any]:
    width = _COLUMNS // columns
    row, column = divmod(at, columns)
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.is_stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    return {
        "title": panel.title,
        "description": panel.about,
        "type": "stat" if panel.is_number else "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * width, "y": top + row * height, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query.expr.replace("$range", RANGE),
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def rules() -> str:
    """Return the rules of Prometheus."""
    written = "\n".join(map(_rule, ALERTS))
    return f"# Written by `make boards`.\ngroups:\n- name: cotrain\n  rules:\n{written}\n"


def _rule(alert: Alert) -> str:
    return f"""\
  - alert: {alert.name}
    expr: {json.dumps(f"({alert.expr}) {alert.condition}")}
    for: {alert.lasts}
    labels: {{severity: page}}
    annotations:
      summary: {json.dumps(alert.summary, ensure_ascii=False)}
      runbook_url: {PAGE}#{alert.anchor}"""


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
