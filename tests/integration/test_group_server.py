"""A whole server whose worker is a group: its processes are killed, and no number of the official
SDK changes."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_vllm import FakeVllm
from tests.support.serving import Serving
from tests.support.waiting import wait_until
from tests.warm.popen import run

KEY = "tml-a-lab_of-one-tenant"
PATIENCE_S = 600
#: One of two processes, then the other, is killed in the middle of a step; then one hangs. Each
#: start begins with four measured passes. Each fault comes at about the second pass after them:
#: with all runs in one pass there are five steps of two passes.
FAULTS = "group.before_pass~member-1=kill@6,group.before_pass~member-0=kill@12,group.before_pass~member-1=stop@19"


def train(serving: Serving, *only: str) -> Any:
    """Train with the official SDK in a separate process, or only sample. Return its answers."""
    program = ["tests.support.group_training", serving.address, KEY, *only]
    command = [sys.executable, "-P", "-m", *program]
    trained = run(command, timeout=PATIENCE_S)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    return json.loads(trained.stdout.splitlines()[-1])


def saved_in(folder: Path) -> set[str]:
    """Return the folders of weights and the files of moments, each named after a digest of its
    content."""
    return {path.name for path in (folder / "weights").rglob("*") if path.name != "owner"}


def workers_of(serving: Serving) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{serving.address}/status", headers=serving.operator)
    with urllib.request.urlopen(request) as answer:
        (pool,) = json.loads(answer.read())["pools"]
    workers: list[dict[str, Any]] = pool["workers"]
    return workers


def members_of(serving: Serving) -> list[int]:
    """Count the runs that each process of the only worker holds, fewest first."""
    return sorted(member["runs"] for member in workers_of(serving)[0]["members"])


def test_a_group_with_killed_or_hung_processes_keeps_its_numbers(tmp_path: Path, base_model: str) -> None:
    with Serving(tmp_path / "alone", [base_model], [KEY]) as serving:
        expected = train(serving)
        (worker,) = workers_of(serving)
        assert worker["members"] == []
    settings = {
        "COTRAIN_FAILPOINTS": FAULTS,
        "COTRAIN_FAILPOINTS_LOG": str(tmp_path / "moments"),
        "COTRAIN_GROUP_TIMEOUT_S": "30",
    }
    folder = tmp_path / "group"
    with Serving(folder, [base_model], [KEY], ["--group-size=2"], settings) as serving:
        assert "groups train and do not sample" in serving.log
        found = train(serving)
        assert found["numbers"] == expected["numbers"]
        assert "COTRAIN_SAMPLER=vllm" in found["sampled"]
        wait_until(lambda: members_of(serving) == [1, 2])
    log = (folder / "logs" / "worker-w0.log").read_text()
    assert log.count('"event": "worker_started"') == 4, log
    assert log.count("group_ended") == 3
    assert log.count('"event": "worker_stopped"') == 1
    assert "Timed out" in log, "nothing waited for the process that stood still"
    assert saved_in(folder) == saved_in(tmp_path / "alone")


def test_a_vllm_server_samples_for_a_group(tmp_path: Path, base_model: str) -> None:
    name, _, folder = base_model.partition("=")
    with FakeVllm(Path(folder), name) as vllm:
        settings = {"COTRAIN_SAMPLER": "vllm", "COTRAIN_VLLM_URL": vllm.url}
        options = ["--group-size=2"]
        with Serving(tmp_path / "group", [base_model], [KEY], options, settings) as serving:
            assert "do not sample" not in serving.log
            assert train(serving, "sample")["sampled"] == "answered"


def test_a_group_that_cannot_load_its_base_model_reports_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match=f"Base model {tmp_path / 'empty'} cannot be served"):
        Serving(tmp_path / "server", [f"tiny={tmp_path / 'empty'}"], [KEY], ["--group-size=2"]).__enter__()
