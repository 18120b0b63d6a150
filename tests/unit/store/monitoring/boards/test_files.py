"""The boards and rules in docker/observe are what the lists say, of metrics that there are."""

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
    """Name the metric that a series is of."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if stem in METRICS and METRICS[stem].kind is Kind.HISTOGRAM else name


@pytest.mark.parametrize("place", files(), ids=str)
def test_the_files_are_what_the_lists_say(place: Path) -> None:
    assert (FOLDER / place).read_text() == files()[place], "run `make boards`, and commit them"


def test_no_other_board_is_there() -> None:
    boards = (FOLDER / "grafana" / "boards").iterdir()
    assert {path.relative_to(FOLDER) for path in boards} == files().keys() - {Path("rules.yml")}


def test_what_is_asked_for_is_defined_and_what_is_defined_is_asked_for() -> None:
    asked = {base(name) for expr in EXPRESSIONS for name in re.findall(r"\bcotrain_\w+", expr)}
    assert asked == METRICS.keys()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_no_panel_lies_over_another(board: object) -> None:
    written = json.loads(files()[Path("grafana/boards") / f"{board.uid}.json"])  # type: ignore[attr-defined]
    taken: set[tuple[int, int]] = set()
    for panel in written["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_the_page_says_what_to_do(alert: object) -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    assert alert.name in headings  # type: ignore[attr-defined]
