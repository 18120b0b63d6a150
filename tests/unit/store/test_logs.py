from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from cotrain_store.logs import configure_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CANARY = "tml-0a1b2c3d_S3cr3t-of_the.tenant"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Configure the logs as a process does; return a function that reads what was written."""
    before = structlog.get_config()
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logs("tester")

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in written.getvalue().splitlines()]

    yield lines
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before)


def test_an_event_is_one_line_of_json_that_names_its_process(logged: Any) -> None:
    structlog.get_logger().info("cycle_committed", cycle=3, text="two\nlines")
    (line,) = logged()
    assert line["event"] == "cycle_committed"
    assert (line["process"], line["level"], line["cycle"]) == ("tester", "info", 3)
    assert line["ts"].endswith("Z")


@pytest.mark.parametrize("key", [CANARY, "sk-abc.DEF_1-2"])
def test_no_key_is_ever_written_wherever_it_got_in(logged: Any, key: str) -> None:
    logger = structlog.get_logger()
    logger.info("said", key=key, headers={"X-API-Key": key}, tried=[[key]], text=f"<{key}>")
    logger.info(key)
    logger.bind(**{key: 1}).info("bound")
    try:
        int(key)
    except ValueError:
        logger.exception("failed")
    written = json.dumps(logged())
    assert "[key]" in written
    assert key not in written
    assert key.partition("-")[2] not in written


def test_details_are_left_out_unless_asked_for(logged: Any) -> None:
    structlog.get_logger().debug("detail")
    assert logged() == []
