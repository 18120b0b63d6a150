"""Health probe, with real answers and with none, and problems that a supervisor writes for the API."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from typing_extensions import override

from cotrain_server.probe import main, probe, read_problems, write_problems
from tests.support.local_server import Handler, LocalServer


class Answers(Handler):
    @override
    def respond(self) -> None:
        self.answer(200 if self.path == "/healthz" else 503, b"because")


@pytest.fixture
def address() -> Iterator[str]:
    with LocalServer(Answers) as server:
        yield server.address


def test_the_probe_of_a_healthy_server_exits_with_0(address: str) -> None:
    assert main([f"{address}/healthz"]) == 0


def test_the_probe_of_an_unready_server_exits_with_1_and_the_reason(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{address}/readyz"]) == 1
    assert capsys.readouterr().err == "503 because\n"


def test_without_a_listener_the_status_is_zero() -> None:
    assert probe("http://127.0.0.1:1/healthz") == (0, b"")


def test_problems_are_reported_per_process(tmp_path: Path) -> None:
    assert read_problems(tmp_path) == []
    write_problems(tmp_path, {"worker": "died.", "redis": "died, too."})
    assert read_problems(tmp_path) == ["redis: died, too.", "worker: died."]
    write_problems(tmp_path, {})
    assert read_problems(tmp_path) == []


def test_a_full_disk_does_not_stop_a_process_that_writes_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_space)
    write_problems(tmp_path, {"redis": "died."})
    assert read_problems(tmp_path) == []
