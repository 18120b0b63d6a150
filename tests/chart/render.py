"""Rendering of the chart by Helm, with the values of its examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "cotrain"
RELEASE, NAMESPACE = "demo", "ml"


def examples() -> dict[str, dict[str, Any]]:
    """Return the values of each example by its name."""
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    return {file.name.removesuffix("-values.yaml"): yaml.safe_load(file.read_text()) or {} for file in files}


def rendered(values: dict[str, Any]) -> str:
    """Return all rendered objects as one YAML text, without the notes."""
    from helm_python import Chart

    found = Chart.load(CHART).render(values, name=RELEASE, namespace=NAMESPACE)
    parts = [text for path, text in sorted(found.items()) if path.endswith(".yaml")]
    return yaml.safe_dump_all([each for part in parts for each in yaml.safe_load_all(part) if each])
