"""Files in docker/observe compared with the lists of boards and rules, all of existing metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cotrain_store.monitoring.boards.files import ALERTS, BOARDS, FOLDER, PAGE, files
from cotrain_store.monitoring.definitions import METRICS, Kind

ROOT = Path(__file__).parents[5]
EXPRESSIONS = [
    *(query.expr for board in BOARDS for panel in board.panels for query in panel.queries),
    *(alert.expr for alert in ALERTS),
]


def base(name: str) -> str:
    """Return the metric that a series belongs to."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if stem in METRICS and METRICS[stem].kind is Kind.HISTOGRAM else name


@pytest.mark.parametrize("place", files(), ids=str)
def test_the_files_equal_the_lists(place: Path) -> None:
    assert (FOLDER / place).read_text() == files()[place], "run `make boards`, and commit them"


def test_there_is_no_other_board() -> None:
    boards = (FOLDER / "grafana" / "boards").iterdir()
    assert {path.relative_to(FOLDER) for path in boards} == files().keys() - {Path("rules.yml")}


def test_every_metric_is_queried_and_every_queried_metric_exists() -> None:
    asked = {base(name) for expr in EXPRESSIONS for name in re.findall(r"\bcotrain_\w+", expr)}
    assert asked == METRICS.keys()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_no_panel_overlaps_another(board: object) -> None:
    written = json.loads(files()[Path("grafana/boards") / f"{board.uid}.json"])  # type: ignore[attr-defined]
    taken: set[tuple[int, int]] = set()
    for panel in written["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_section_with_its_remedy(alert: object) -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert alert.name in headings  # type: ignore[attr-defined]
