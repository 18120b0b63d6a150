"""Render the chart with the values of its examples, into the files that the quick tests read: `python -m tests.chart.render`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "cotrain"
RENDERED = ROOT / "deploy" / "helm" / "rendered"
RELEASE, NAMESPACE = "demo", "ml"


def examples() -> dict[str, dict[str, Any]]:
    """Read the values of each example, by its name."""
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    return {
        file.name.removesuffix("-values.yaml"): yaml.safe_load(file.read_text()) or {}
        for file in files
    }


def rendered(values: dict[str, Any]) -> str:
    """Render everything but the notes, as one file."""
    from helm_python import Chart

    found = Chart.load(CHART).render(values, name=RELEASE, namespace=NAMESPACE)
    parts = [text for path, text in sorted(found.items()) if path.endswith(".yaml")]
    documents = [each for part in parts for each in yaml.safe_load_all(part) if each]
    header = "# Written by `make chart` from deploy/helm/cotrain; the tests read it.\n"
    return header + "".join(
        f"---\n{yaml.safe_dump(each, sort_keys=False, width=140)}" for each in documents
    )


def main() -> None:
    """Write all examples anew."""
    RENDERED.mkdir(exist_ok=True)
    for old in RENDERED.glob("*.yaml"):
        old.unlink()
    for name, values in examples().items():
        (RENDERED / f"{name}.yaml").write_text(rendered(values))


if __name__ == "__main__":
    main()
