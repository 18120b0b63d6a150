"""Problems that a supervisor writes for the API."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cotrain_server.problems import read_troubles, write_troubles


def test_problems_are_reported_per_process(tmp_path: Path) -> None:
    assert read_troubles(tmp_path) == []
    write_troubles(tmp_path, {"worker": "died.", "redis": "died, too."})
    assert read_troubles(tmp_path) == ["redis: died, too.", "worker: died."]
    write_troubles(tmp_path, {})
    assert read_troubles(tmp_path) == []


def test_a_full_disk_does_not_stop_a_process_that_writes_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    write_troubles(tmp_path, {"redis": "died."})
    assert read_troubles(tmp_path) == []
