"""Metrics ports under `cotrain serve`: one per process, listed in a file."""

from pathlib import Path

import pytest

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_server.supervisor.programs import Plan, Programs


def programs(tmp_path: Path) -> Programs:
    plan = Plan(("a", "b"), tmp_path, "unix:///none", {}, "127.0.0.1")
    return Programs(plan, DataFolder(tmp_path), "unix:///none", 0, 0)


def ports_of(made: Programs) -> list[str | None]:
    processes = [made.api(), made.scheduler(), *made.workers()]
    return [process.environment.get("COTRAIN_METRICS_PORT") for process in processes]


def test_the_ports_are_consecutive_and_listed_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_METRICS_PORT", "9464")
    made = programs(tmp_path)
    assert ports_of(made) == ["9464", "9465", "9466", "9467"]
    targets = {each["labels"]["job"]: each["targets"] for each in made.metrics_targets()}
    assert targets == {
        "cotrain-api": ["127.0.0.1:9464"],
        "cotrain-scheduler": ["127.0.0.1:9465"],
        "cotrain-worker": ["127.0.0.1:9466", "127.0.0.1:9467"],
        "cotrain-fleet": ["127.0.0.1:9464"],
    }


@pytest.mark.parametrize("given", ["", "0"])
def test_without_a_port_there_is_no_scrape_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("COTRAIN_METRICS_PORT", given)
    assert programs(tmp_path).metrics_targets() == []


def test_an_invalid_port_is_refused_by_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_METRICS_PORT", "http")
    assert set(ports_of(programs(tmp_path))) == {"http"}
