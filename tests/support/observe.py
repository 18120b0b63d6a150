"""Reader of the Grafana boards and the Prometheus rules in docker/observe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "docker" / "observe"
RULES = FOLDER / "rules.yml"


def boards() -> dict[str, dict[str, Any]]:
    """Return each board by the name of its file, without the suffix."""
    files = sorted((FOLDER / "grafana" / "boards").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a board, also those in folded rows, without the rows."""
    every = [each for top in board["panels"] for each in (top, *top.get("panels", ()))]
    return [each for each in every if each["type"] != "row"]


def alerts() -> dict[str, dict[str, Any]]:
    """Return each alert rule by its name."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def value_of(alert: dict[str, Any]) -> str:
    """Return the compared expression of a rule, without the threshold. It always has a value."""
    match = re.fullmatch(r"\((.+)\) [<>] [\d.]+", alert["expr"])
    assert match, f"{alert['alert']}: write expr as (value) > threshold"
    return match[1]


def queries() -> list[str]:
    """Return the queries of all panels, for all pools and workers, and the compared expressions of
    all alerts. Queries of metrics of GPUs, which another exporter has, are left out.
    """
    shown = [panel for board in boards().values() for panel in panels(board)]
    written = [target["expr"] for panel in shown for target in panel["targets"]]
    written = [expr for expr in written if not expr.startswith("DCGM_")]
    of_panels = [re.sub(r'"\$(pool|worker)"', '".*"', expr) for expr in written]
    return [*of_panels, *map(value_of, alerts().values())]
