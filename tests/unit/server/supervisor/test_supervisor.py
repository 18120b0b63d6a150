"""Shutdown of a server: first the processes that accept work, last those that store it, each with a time limit."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_server.supervisor.process import Program
from cotrain_server.supervisor.programs import Plan, Programs
from cotrain_server.supervisor.supervisor import Supervisor
from tests.support.waiting import until

#: Program that ends at SIGTERM and appends its name to a shared file.
ORDERLY = "trap 'echo {name} >> {order}; exit 0' TERM; echo up; while :; do sleep 0.02; done"
STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.02; done"


@pytest.fixture
def supervisor(tmp_path: Path, lines: list[str]) -> Supervisor:
    plan = Plan(
        base_models=("a/b", "c/d"), host="127.0.0.1", port=0, data_dir=tmp_path, redis_url=None,
        api_keys=(), accept_data_loss=False, given={},
    )  # fmt: skip
    return Supervisor(plan, lines.append, lambda *_: None)


@pytest.fixture
def lines() -> list[str]:
    """Lines that the operator reads."""
    return []


def program(folder: Path, name: str, script: str, grace_s: float = 60) -> Program:
    command = ["sh", "-c", script.format(name=name, order=folder / "order")]
    return Program(name, command, {"PATH": os.environ["PATH"]}, grace_s)


async def until_up(folder: DataFolder, lines: list[str], *names: str) -> None:
    """Wait until each process has set its trap and the supervisor has recorded it. A process still
    being started is killed at once.
    """
    logs = [folder.log_of(name) for name in names]
    await until(lambda: all(log.exists() and log.read_text() for log in logs))
    said = [f"{name} started" for name in names]
    await until(lambda: all(any(line.startswith(each) for line in lines) for each in said))


async def test_stages_stop_in_the_reverse_order_of_their_start(
    supervisor: Supervisor, tmp_path: Path, lines: list[str]
) -> None:
    folder = DataFolder(tmp_path)

    def hear(line: str) -> None:
        lines.append(line)
        name, is_killed, _ = line.partition(" did not end")
        if is_killed:
            with (tmp_path / "order").open("a") as order:
                order.write(f"{name}\n")

    supervisor.say = hear
    supervisor._add(folder, [program(tmp_path, "redis", ORDERLY)])
    supervisor._add(folder, [program(tmp_path, "w0", STUBBORN, grace_s=0.2), program(tmp_path, "w1", ORDERLY)])
    supervisor._add(folder, [program(tmp_path, "scheduler", ORDERLY)])
    supervisor._add(folder, [program(tmp_path, "api", STUBBORN, grace_s=0.2)])
    await until_up(folder, lines, "redis", "w0", "w1", "scheduler", "api")
    await supervisor._drain()

    ended = (tmp_path / "order").read_text().split()
    assert ended[:2] == ["api", "scheduler"]
    assert set(ended[2:4]) == {"w0", "w1"}
    assert ended[4:] == ["redis"]
    shown = [line for line in lines if "started" not in line]
    assert shown == [
        "api did not end in 0.2 s; killing it", "w0 did not end in 0.2 s; killing it", "stopped",
    ]  # fmt: skip


async def test_a_worker_that_lost_its_device_is_restarted(
    supervisor: Supervisor, tmp_path: Path, lines: list[str]
) -> None:
    folder, lost = DataFolder(tmp_path), tmp_path / "lost"
    dies_once = f"if ! test -e {lost}; then touch {lost}; exit 70; fi; {ORDERLY}"
    supervisor._add(folder, [program(tmp_path, "w0", dies_once)])
    await until_up(folder, lines, "w0")
    await until(lambda: sum("started" in line for line in lines) == 2)  # including the second start
    await supervisor._drain()
    assert [line.partition(";")[0] for line in lines if "exited" in line] == ["w0 exited with status 70"]
    assert sum("started" in line for line in lines) == 2


@pytest.mark.parametrize(("set_to", "grace_s"), [(None, 60.0), ("300", 300.0), ("soon", 60.0)])
def test_each_process_has_its_documented_grace_period(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, set_to: str | None, grace_s: float
) -> None:
    if set_to:
        monkeypatch.setenv("COTRAIN_STOP_GRACE_S", set_to)
    folder = DataFolder(supervisor.plan.data_dir)
    made = Programs(supervisor.plan, folder, "unix:///nowhere", lock=0, listener=0)
    workers = made.workers()
    assert [worker.grace_s for worker in workers] == [grace_s, grace_s]
    assert workers[0].environment.get("COTRAIN_STOP_GRACE_S") == set_to
    assert (made.redis().grace_s, made.scheduler().grace_s, made.api().grace_s) == (30, 5, 10)


def test_workers_of_two_base_models_compute_on_two_gpus(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    folder = DataFolder(supervisor.plan.data_dir)
    made = Programs(supervisor.plan, folder, "unix:///nowhere", lock=0, listener=0)
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in made.workers()] == ["4", "6"]


def made_by(supervisor: Supervisor, **plan: Any) -> list[dict[str, str]]:
    """Return the variables of each worker of this plan."""
    folder = DataFolder(supervisor.plan.data_dir)
    made = Programs(replace(supervisor.plan, **plan), folder, "unix:///nowhere")
    return [dict(worker.environment) for worker in made.workers()]


def ids_of(workers: list[dict[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in workers:
        found.setdefault(each["COTRAIN_BASE_MODEL"], []).append(each["COTRAIN_WORKER_ID"])
    return found


def test_a_base_model_keeps_its_worker_ids_when_it_gets_more_workers(supervisor: Supervisor) -> None:
    cpu = {"given": {"DEVICE": "cpu"}}
    assert ids_of(made_by(supervisor, **cpu)) == {"a/b": ["w0"], "c/d": ["w1"]}
    assert ids_of(made_by(supervisor, workers=2, **cpu)) == {"a/b": ["w0", "w2"], "c/d": ["w1", "w3"]}


def test_gpus_are_assigned_to_the_base_models_in_turn(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    workers = made_by(supervisor, gpus=("0", "2", "5"))
    assert ids_of(workers) == {"a/b": ["w0", "w2"], "c/d": ["w1"]}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in workers] == ["0", "2", "5"]
    assert all("COTRAIN_TORCH_THREADS" not in each for each in workers)


def test_workers_on_a_cpu_share_its_cores_and_memory_by_default(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(9))
    given = {"DEVICE": "cpu", "TORCH_THREADS": "0"}
    workers = made_by(supervisor, workers=2, given=given)
    assert [each["COTRAIN_TORCH_THREADS"] for each in workers] == ["2"] * 4
    assert [each["COTRAIN_WORKERS_ON_HOST"] for each in workers] == ["4"] * 4
    many = made_by(supervisor, workers=8, given=given)
    assert {each["COTRAIN_TORCH_THREADS"] for each in many} == {"1"}
    told = made_by(supervisor, workers=2, given=given | {"TORCH_THREADS": "3"})
    assert {each["COTRAIN_TORCH_THREADS"] for each in told} == {"3"}
    alone = made_by(supervisor, base_models=("a/b",), given=given)
    assert [each["COTRAIN_TORCH_THREADS"] for each in alone] == ["0"]


def test_workers_of_another_host_are_named_after_it_and_need_no_lock(supervisor: Supervisor) -> None:
    workers = made_by(supervisor, worker_names="gpu-7-w", given={"DEVICE": "cpu"})
    assert ids_of(workers) == {"a/b": ["gpu-7-w0"], "c/d": ["gpu-7-w1"]}


def test_libraries_of_a_server_start_one_thread_by_default(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    folder = DataFolder(supervisor.plan.data_dir)
    made = Programs(supervisor.plan, folder, "unix:///nowhere", lock=0, listener=0)
    for program in (made.api(), made.scheduler()):
        assert program.environment["OMP_NUM_THREADS"] == "1"
        assert program.environment["OPENBLAS_NUM_THREADS"] == "3"
    worker = made.workers()[0]
    assert "OMP_NUM_THREADS" not in worker.environment
    assert worker.environment["GOMP_SPINCOUNT"] == "10000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert made.workers()[0].environment["GOMP_SPINCOUNT"] == "7"
