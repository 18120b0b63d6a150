"""Which GPU each worker of a server is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cotrain_server.supervisor.gpus import gpus, shared, variables_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("2,5", ["2", "5"]), ("GPU-aa, GPU-bb", ["GPU-aa", "GPU-bb"]), ("", []), (None, ["0", "1"])],
)
def test_gpus_are_those_that_are_visible_else_those_of_the_driver(
    tmp_path: Path, listed: str | None, expected: list[str]
) -> None:
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / address).mkdir()
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}

    assert gpus(environ, tmp_path) == expected


def test_a_host_without_a_driver_has_none(tmp_path: Path) -> None:
    assert gpus({}, tmp_path / "none") == []


def test_each_worker_sees_another_gpu() -> None:
    seen = [variables_of(at, ["2", "5"]) for at in range(3)]

    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == ["2", "5", "2"]
    assert variables_of(0, ["2"]) == variables_of(1, []) == {}


def test_workers_that_have_to_share_a_gpu_are_worth_a_word() -> None:
    assert shared(2, ["0", "1"]) is None
    assert shared(2, []) is None
    assert "2 base models and 1 GPU:" in (shared(2, ["0"]) or "")
