"""Variables of each process, the refusal of misspelt ones, and the GPUs of workers."""

import re
from pathlib import Path

import pytest

from cotrain_server.supervisor import environment as variables
from cotrain_server.supervisor.environment import (
    UnfitGpus,
    check_group_gpus,
    gpu_notice,
    gpu_variables,
    parse_gpus,
    visible_gpus,
)


def test_a_process_gets_its_own_variables_and_no_others() -> None:
    inherited = {
        "PATH": "/bin",
        "COTRAIN_CLOCK_MODE": "metronome",
        "COTRAIN_DTYPE": "float32",
        "COTRAIN_LOG_LEVEL": "debug",
    }
    made = variables.environment(variables.WORKER, {"LOG_LEVEL": "info"}, inherited)
    assert made == {"PATH": "/bin", "COTRAIN_DTYPE": "float32", "COTRAIN_LOG_LEVEL": "info"}


def test_a_flag_overrides_the_environment_of_its_own_process_only() -> None:
    made = variables.environment(variables.API, {"PORT": "1", "DEVICE": "cpu"}, {"COTRAIN_PORT": "2"})
    assert made == {"COTRAIN_PORT": "1"}


def test_a_misspelt_variable_is_refused_and_a_client_variable_is_not() -> None:
    environ = {"COTRAIN_CLOCK_MOD": "x", "COTRAIN_BASE_URL": "x", "COTRAIN_PROGRESS": "0", "A": "b"}
    assert variables.refused_variables(environ) == ["Unknown settings: COTRAIN_CLOCK_MOD."]


def test_every_process_gets_its_failpoints() -> None:
    inherited = {"COTRAIN_FAILPOINTS": "x", "COTRAIN_FAILPOINTS_LOG": "y"}
    assert variables.environment(variables.API, {}, inherited) == inherited
    assert variables.refused_variables(inherited) == []


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("2,5", ["2", "5"]), ("GPU-aa, GPU-bb", ["GPU-aa", "GPU-bb"]), ("", []), (None, ["0", "1"])],
)
def test_gpus_are_the_visible_ones_or_those_of_the_driver(
    tmp_path: Path, listed: str | None, expected: list[str]
) -> None:
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / address).mkdir()
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    assert visible_gpus(environ, tmp_path) == expected


def test_a_host_without_a_driver_has_none(tmp_path: Path) -> None:
    assert visible_gpus({}, tmp_path / "none") == []


def test_each_worker_sees_its_own_gpu_by_the_number_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = [gpu_variables(at, ["2", "5"]) for at in range(3)]

    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["2", "5", "2"]
    assert {each["CUDA_DEVICE_ORDER"] for each in seen} == {"PCI_BUS_ID"}
    assert gpu_variables(1, []) == {}


def test_a_group_sees_as_many_gpus_as_it_has_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = parse_gpus("all", 2, ["2", "5", "6", "7"], group_size=2)
    seen = [gpu_variables(at, names, group_size=2)["CUDA_VISIBLE_DEVICES"] for at in range(2)]

    assert seen == ["2,5", "6,7"]
    assert gpu_notice(2, names, group_size=2) is None
    assert gpu_notice(1, names, group_size=2) == "2 of 4 GPUs in use: --gpus all has a worker on each"


@pytest.mark.parametrize(
    ("asked", "base_models", "why"),
    [
        ("0,1,2", 1, "3 GPUs and groups of 2; each process of a group needs one of its own"),
        ("0,1", 2, "2 base models and 2 GPUs; each needs 2 of its own"),
    ],
)
def test_a_group_without_enough_gpus_is_refused(asked: str, base_models: int, why: str) -> None:
    with pytest.raises(UnfitGpus, match=re.escape(why)):
        parse_gpus(asked, base_models, ["0", "1", "2"], group_size=2)


def test_groups_on_the_gpus_of_this_host_need_enough_of_them() -> None:
    check_group_gpus(1, [], 8)
    check_group_gpus(1, ["0", "1"], 2)
    with pytest.raises(UnfitGpus, match="needs a GPU of its own, and this host has 2"):
        check_group_gpus(2, ["0", "1"], 2)


def test_gpu_numbers_set_by_the_operator_keep_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert gpu_variables(1, ["2", "5"]) == {"CUDA_VISIBLE_DEVICES": "5"}


@pytest.mark.parametrize(("asked", "names"), [("all", ("2", "5", "7")), ("5", ("5",)), (" 7, 2 ,", ("7", "2"))])
def test_all_gpus_or_named_ones_are_chosen(asked: str, names: tuple[str, ...]) -> None:
    assert parse_gpus(asked, 1, ["2", "5", "7"]) == names


@pytest.mark.parametrize(
    ("asked", "base_models", "there", "why"),
    [
        ("all", 1, [], "no GPU can be seen here"),
        ("0,3", 1, ["0", "1"], "there is no GPU 3. There are 0, 1, or `all`"),
        (",", 1, ["0"], "there is no GPU named ','"),
        ("1,1", 1, ["0", "1"], "name each GPU once"),
        ("0,1", 3, ["0", "1"], "3 base models and 2 GPUs; each needs one of its own"),
    ],
)
def test_an_unavailable_gpu_is_refused_by_name(asked: str, base_models: int, there: list[str], why: str) -> None:
    with pytest.raises(UnfitGpus, match=re.escape(why)):
        parse_gpus(asked, base_models, there)


def test_shared_and_unused_gpus_are_reported() -> None:
    assert gpu_notice(2, ["0", "1"]) is None
    assert gpu_notice(2, []) is None
    assert "2 base models and 1 GPU:" in (gpu_notice(2, ["0"]) or "")
    assert gpu_notice(1, ["0", "1"]) == "1 of 2 GPUs in use: --gpus all has a worker on each"
