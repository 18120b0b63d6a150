from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from cotrain_store.monitoring.logs import REQUESTS_PER_LINE, configure_logs, log_requests
from tests.support.processes import environment_of

CANARY = "tml-0a1b2c3d_S3cr3t-of_the.tenant"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Configure the logs as a process does. Return a function that reads the written lines."""
    before = structlog.get_config()
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logs("tester")

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in written.getvalue().splitlines()]

    yield lines
    structlog.contextvars.clear_contextvars()
    structlog.configure(**before)


def test_an_event_is_one_json_line_with_its_process(logged: Any) -> None:
    structlog.get_logger().info("cycle_committed", cycle=3, text="two\nlines")
    (line,) = logged()
    assert line["event"] == "cycle_committed"
    assert (line["process"], line["level"], line["cycle"]) == ("tester", "info", 3)
    assert line["ts"].endswith("Z")


@pytest.mark.parametrize("key", [CANARY, "sk-abc.DEF_1-2"])
def test_no_key_is_written_from_any_part_of_an_event(logged: Any, key: str) -> None:
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


def test_debug_lines_are_left_out_by_default(logged: Any) -> None:
    structlog.get_logger().debug("detail")
    assert logged() == []


def test_the_time_is_the_first_field(logged: Any) -> None:
    structlog.get_logger().warning("said", of="something")
    assert list(logged()[0]) == ["ts", "level", "process", "event", "of"]


def test_the_requests_of_a_large_cycle_are_logged_on_several_lines(logged: Any) -> None:
    requests = [f"s:train:0:{seq}" for seq in range(2 * REQUESTS_PER_LINE + 1)]
    log_requests(structlog.get_logger().info, "cycle_planned", requests, cycle=7, ops=len(requests))
    lines = logged()
    assert [line["event"] for line in lines] == ["cycle_planned", *["cycle_requests"] * 2]
    assert {line["cycle"] for line in lines} == {7}
    assert [each for line in lines for each in line["requests"]] == requests
    assert max(len(line["requests"]) for line in lines) == REQUESTS_PER_LINE


#: Program with every kind of unintended output, and an uncaught exception at its end.
TALKATIVE = r"""
import logging, sys, threading, warnings
noisy = logging.getLogger("library")
noisy.addHandler(logging.StreamHandler())
noisy.propagate = False
from cotrain_store.monitoring.logs import start_logs
start_logs("first")
start_logs("talker")
noisy.error("of a %s\nin two lines", "library")
noisy.info("not worth a line")
logging.getLogger("odd").log(35, "100% odd")
warnings.warn("mind the step")
thread = threading.Thread(target=lambda: 1 / 0, name="beat")
thread.start()
thread.join()
Careless = type("Careless", (), {"__del__": lambda self: {}["gone"]})
Careless()
raise SystemError("the end")
"""


def test_all_output_of_a_process_is_json_with_the_time_first() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TALKATIVE], env=environment_of({}), capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert {next(iter(line)) for line in lines} == {"ts"}
    assert {line["process"] for line in lines} == {"talker"}
    said = [(line["level"], line["event"]) for line in lines]
    assert said[0] == ("error", "of a library\nin two lines")
    assert said[1] == ("warning", "100% odd")
    assert "mind the step" in said[2][1]
    assert [event for _, event in said[3:]] == ["thread_crashed", "exception_ignored", "crashed"]
    assert "ZeroDivisionError" in lines[3]["exception"]
    assert "SystemError: the end" in lines[-1]["exception"]


def test_a_full_disk_does_not_stop_a_process_that_logs() -> None:
    script = "from cotrain_store.monitoring.logs import start_logs, log\nstart_logs('x')\nlog.info('lost')\nprint(1)"
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", script],
            env=environment_of({}), stderr=full, stdout=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert ran.stdout == b"1\n"
