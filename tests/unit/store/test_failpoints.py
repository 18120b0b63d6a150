"""Failpoints: valid faults, their timing, and the use of every registered name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest

from cotrain_store import failpoints
from cotrain_store.failpoints import FAILPOINTS, Faults, failpoint, parse_faults, write_past

ROOT = Path(__file__).parents[3]
PLACED = re.compile(r'(?:failpoint|write_past)\(\s*"([^"]*)"')
#: Failpoints that a put of a blob passes.
MOMENTS = re.compile(r'Moments\("([^"]*)", "([^"]*)", "([^"]*)"\)')


def struck(faults: Faults, name: str, about: str = "") -> bool:
    try:
        faults.reach(name, about)
    except OSError:
        return True
    return False


def test_every_registered_failpoint_is_used_and_no_other() -> None:
    sources = [path for folder in ("scheduler", "server", "workers") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text() for path in sources]
    placed = [name for text in texts for name in PLACED.findall(text)]
    placed += [name for text in texts for names in MOMENTS.findall(text) for name in names]
    assert set(placed) == set(FAILPOINTS)


@pytest.mark.parametrize(
    "text", ["worker.nowhere=kill", "worker.entered", "worker.entered=hurt", "worker.entered=kill@0", "=kill"]
)
def test_an_invalid_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no fault"):
        parse_faults(text)


def test_a_fault_occurs_once_at_its_nth_call() -> None:
    faults = Faults(parse_faults("worker.entered=error@2,worker.entered=error@4"), None)
    assert [struck(faults, "worker.entered") for _ in range(5)] == [False, True, False, True, False]
    assert not struck(faults, "worker.after_run")


def test_a_fault_for_one_subject_counts_only_its_calls() -> None:
    faults = Faults(parse_faults("worker.before_run~b:7=error@*"), None)
    assert [struck(faults, "worker.before_run", about) for about in ("a:7", "b:7", "", "b:7")] == [
        False, True, False, True,
    ]  # fmt: skip


def test_with_a_log_calls_are_counted_across_processes(tmp_path: Path) -> None:
    log = tmp_path / "reached"
    one, other = (Faults(parse_faults("worker.entered=error@2"), str(log)) for _ in range(2))
    assert not struck(one, "worker.entered")
    assert struck(other, "worker.entered")
    assert not struck(one, "worker.entered")
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["worker.entered"] * 3


def test_a_concurrent_line_of_another_process_hides_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(parse_faults("worker.entered~mine=error"), str(tmp_path / "reached"))
    write = os.write

    def write_as_another_does(log: int, line: bytes) -> int:
        return write(log, line) + write(log, b"worker.entered 1 other\n")

    monkeypatch.setattr("cotrain_store.failpoints.os.write", write_as_another_does)
    assert struck(faults, "worker.entered", "mine")


def test_an_unregistered_failpoint_is_an_error_while_failpoints_are_on() -> None:
    with pytest.raises(ValueError, match="is no failpoint"):
        Faults([], None).reach("worker.nowhere", "")


def test_without_the_variable_failpoints_do_nothing() -> None:
    assert failpoints._FAULTS is None
    failpoint("worker.nowhere")
    file = BytesIO()
    write_past("snapshot.half_written", file, b"whole")
    assert file.getvalue() == b"whole"


def test_a_fault_cuts_a_write_in_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_FAULTS", Faults(parse_faults("snapshot.half_written=error"), None))
    file = BytesIO()
    with pytest.raises(OSError, match="Failpoint"):
        write_past("snapshot.half_written", file, b"halves")
    assert file.getvalue() == b"hal"
    write_past("snapshot.half_written", file, b"whole")
    assert file.getvalue() == b"halwhole"


@pytest.mark.parametrize(("action", "status"), [("kill", -9), ("sleep:0.01", 0)])
def test_a_process_reads_its_faults_at_its_start(action: str, status: int) -> None:
    code = "from cotrain_store.failpoints import failpoint; failpoint('worker.entered')"
    environment = {"PYTHONPATH": str(ROOT / "scheduler"), "COTRAIN_FAILPOINTS": f"worker.entered={action}"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == status
