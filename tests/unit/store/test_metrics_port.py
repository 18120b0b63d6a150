"""Metrics port: off by default, with its own threads. A process does not start if its port is in use."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cotrain_store.metrics_port import metrics_port, own_metrics
from cotrain_store.monitoring.definitions import Source
from cotrain_store.settings import StoreSettings
from tests.support.ports import free_port


def settings_of(tmp_path: Path, port: int) -> StoreSettings:
    return StoreSettings(redis_url="unix:///none", data_dir=tmp_path, metrics_port=port)


def get(port: int | None, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        content: bytes = answer.read()
    return content


def test_the_metrics_port_is_off_by_default(tmp_path: Path) -> None:
    settings = StoreSettings(redis_url="unix:///none", data_dir=tmp_path)
    with metrics_port(settings, own_metrics(Source.WORKER)) as port:
        assert port is None


def test_only_the_metrics_of_the_process_are_shown(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, free_port())
    with metrics_port(settings, own_metrics(Source.SCHEDULER)) as port:
        assert b"# TYPE cotrain_scheduler_leader gauge" in get(port, "/metrics")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(port, "/status")
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")


def test_a_failed_page_is_an_error_and_the_next_one_is_answered(tmp_path: Path) -> None:
    answers = iter([0, 1])

    def page() -> bytes:
        return b"fine" * (1 // next(answers))

    with metrics_port(settings_of(tmp_path, free_port()), {"/metrics": page}) as port:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            get(port, "/metrics")
        assert get(port, "/metrics") == b"fine"


def test_a_port_in_use_ends_the_process_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = settings_of(tmp_path, taken.getsockname()[1])
        with pytest.raises(SystemExit, match="2"), metrics_port(settings, {}):
            pass
    assert "COTRAIN_METRICS_PORT" in "".join(capsys.readouterr())
