"""Conversion of printed lines to JSON, with the time first. Lines that are JSON already stay unchanged."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cotrain_server.supervisor import json_log as loglines
from cotrain_server.supervisor.process import JSON_LOG

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("1234:M 22 Nov 2026 11:22:07.123 * Ready to accept", "info", "Ready to accept"),
        ("1:C 22 Nov 2026 11:22:07.123 # oO0 starting", "warning", "oO0 starting"),
        ("Fatal Python error: Aborted", "info", "Fatal Python error: Aborted"),
        ('{"half": ', "info", '{"half": '),
    ],
)
def test_a_line_becomes_an_event(line: str, level: str, text: str) -> None:
    written = loglines.as_json(line, "redis", NOW)
    assert written is not None
    assert list(json.loads(written).items()) == [
        ("ts", "2026-01-02T03:04:05.000000Z"),
        ("level", level),
        ("process", "redis"),
        ("event", text),
    ]


def test_json_lines_stay_and_empty_lines_are_dropped() -> None:
    own = '{"ts": "x", "event": "y"}'
    assert loglines.as_json(own, "api", NOW) == own
    assert loglines.as_json("  \r", "api", NOW) is None


def test_a_full_disk_loses_lines_but_does_not_end_the_process() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-I", "-S", str(JSON_LOG), "w0"]
        ran = subprocess.run(command, input=b"one\ntwo\n", stdout=full, stderr=full, check=False)
    assert ran.returncode == 0
