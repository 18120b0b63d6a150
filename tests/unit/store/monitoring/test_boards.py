"""The boards and alerts in docker/observe query exactly the metrics that are defined."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cotrain_store.monitoring.definitions import METRICS, Kind
from tests.support.observe import alerts, boards, panels, queries

ROOT = Path(__file__).parents[4]
BOARDS = boards()


def base(name: str) -> str:
    """Return the metric of a series."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if stem in METRICS and METRICS[stem].kind is Kind.HISTOGRAM else name


def test_every_queried_metric_is_defined_and_every_metric_is_queried() -> None:
    queried = {base(name) for expr in queries() for name in re.findall(r"\bcotrain_\w+", expr)}
    assert queried == METRICS.keys()


def rows(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in board["panels"] if each["type"] == "row"]


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_has_rows_variables_and_links_to_the_dashboard(name: str) -> None:
    board = BOARDS[name]
    assert {each["name"] for each in board["templating"]["list"]} == {"pool", "worker", "dashboard"}
    assert any(row["collapsed"] for row in rows(board))
    assert all(bool(row["panels"]) == row["collapsed"] for row in rows(board))
    for panel in panels(board):
        if any("by (tenant" in target["expr"] for target in panel["targets"]):
            (link,) = panel["fieldConfig"]["defaults"]["links"]
            assert link["url"] == "${dashboard}/tenants/${__field.labels.tenant}"
    assert "${dashboard}" in [link.get("url") for link in board["links"]]


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_found_by_its_uid(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == name
    ids = [each["id"] for each in (*panels(board), *rows(board))]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_reads_the_provisioned_prometheus(name: str) -> None:
    source = {"type": "prometheus", "uid": "cotrain"}
    for panel in panels(BOARDS[name]):
        assert panel["datasource"] == source, panel["title"]
        assert [target["datasource"] for target in panel["targets"]] == [source] * len(panel["targets"])


@pytest.mark.parametrize("name", BOARDS)
def test_no_panel_overlaps_another(name: str) -> None:
    board = BOARDS[name]
    for group in (board["panels"], *(row["panels"] for row in rows(board))):
        check_positions(group)


def check_positions(group: list[dict[str, Any]]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in group:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("alert", alerts().values(), ids=lambda alert: alert["alert"])
def test_an_alert_links_the_paragraph_of_its_remedy(alert: dict[str, Any]) -> None:
    page, anchor = alert["annotations"]["runbook_url"].split("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert alert["alert"] in headings
    assert anchor == alert["alert"].lower()
