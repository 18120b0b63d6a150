"""Log lines: those of a start, each read once, and those of a Redis whose next start would fail too."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_server.supervisor.json_log import as_json
from cotrain_server.supervisor.logs import reason_of_redis, startup_activity
from cotrain_server.supervisor.process import Reason

STARTED = ["# oO0OoO0OoO0Oo Redis is starting oO0OoO0OoO0Oo", "# Redis version=7.0.15", "# Server initialized"]


def reason(tmp_path: Path, *said: str) -> Reason | None:
    events = ["# Wrong signature", *STARTED, "* DB loaded", *said]  # the first is of an earlier start
    lines = [as_json(f"7:M 25 Nov 2026 21:07:02.233 {each}", "redis", datetime.now(UTC)) for each in events]
    return reason_of_redis(DataFolder(tmp_path), tmp_path / "redis-server", [x or "" for x in lines])


@pytest.mark.parametrize(
    "said",
    [
        "# Bad file format reading the append only file: make a backup of your AOF file, then use ./redis-check-aof "
        "--fix <filename>",
        "# Bad file format reading the append only file appendonly.aof.2.incr.aof: make a backup of your AOF file, "
        "then use ./redis-check-aof --fix <filename.manifest>",
        "# Unknown command 's0t' reading the append only file appendonly.aof.2.incr.aof",
        "# Wrong RDB checksum expected: (37ea4436bf428ffa) but got (74e0ae0bbd76bd06). Aborting now.",
        "# Short read or OOM loading DB. Unrecoverable error, aborting now.",
        "# The AOF manifest file contains too long line",
        "# Unable to obtain the AOF file appendonly.aof.2.base.rdb length. stat: No such file or directory",
    ],
)
def test_a_damaged_log_is_a_final_reason_and_names_the_remedy(tmp_path: Path, said: str) -> None:
    found = reason(tmp_path, said)
    assert found is not None
    assert found.is_final
    assert said[2:].rstrip(".") in found.text
    assert "--fix" in found.text


def test_a_log_of_a_newer_redis_is_final_and_needs_another_binary(tmp_path: Path) -> None:
    found = reason(
        tmp_path,
        "# Can't handle RDB format version 99",
        "# Error reading the RDB base file appendonly.aof.2.base.rdb, AOF loading aborted",
    )
    assert found is not None
    assert found.is_final
    assert "version 99. Error reading the RDB base file" in found.text
    assert "newer Redis or Valkey" in found.text


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            "# Failed opening Unix socket: bind: Permission denied",
            "Failed opening Unix socket: bind: Permission denied.",
        ),
        ("# Unrecoverable error reading the append only file a.aof: Input/output error", None),
        ("* 'x' is no directive", "DB loaded. 'x' is no directive."),
    ],
)
def test_a_transient_reason_is_reported_and_retried(tmp_path: Path, said: str, text: str | None) -> None:
    found = reason(tmp_path, said)
    assert found is not None
    assert not found.is_final
    assert found.text == (text or f"{said[2:]}.")


def test_a_redis_without_log_lines_gives_no_reason(tmp_path: Path) -> None:
    assert reason_of_redis(DataFolder(tmp_path), tmp_path, ["", "no JSON", '{"event": 1}']) is None


def test_a_full_disk_is_the_reason_though_its_log_lines_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    found = reason(tmp_path, "* monotonic clock: POSIX clock_gettime")
    assert found == Reason(
        f"The disk of {tmp_path} is full, so Redis cannot write its log. Free some space.", is_final=False
    )
    monkeypatch.undo()
    assert reason(tmp_path, "* monotonic clock: POSIX clock_gettime") == Reason("DB loaded.", is_final=False)


def test_only_lines_written_from_now_on_are_read(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.log_of("w0").write_text("of an earlier start\n")
    with folder.new_lines("w0") as lines, folder.log_of("w0").open("a") as log, folder.new_lines("w1") as of_no_log:
        for text in ("one\n", "", "two\nthree\n"):
            log.write(text)
            log.flush()
            assert "".join(lines) == text
        assert list(of_no_log) == []


def test_the_stage_of_a_start_is_read_from_its_log_line() -> None:
    assert startup_activity('{"ts": "x", "event": "starting", "doing": "loading"}') == "loading"
    for other in ('{"event": "cycle_committed"}', "no JSON", "[]", '"starting"'):
        assert startup_activity(other) is None
