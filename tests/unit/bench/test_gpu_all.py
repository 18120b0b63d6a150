from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def call(
    folder: Path, name: str, python: str, printed: list[str] | None = None
) -> tuple[int, Sequence[str]]:
    """Run one call with a stand-in for Python. Return its exit status and the commands it started."""
    stand_in = folder / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$*" >>"{folder}/started"\n{python}\n')
    stand_in.chmod(0o755)
    ran = subprocess.run(
        ["bench/gpu_all.sh", name, str(folder / "out")],
        cwd=ROOT,
        env={"PYTHON": str(stand_in), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
        text=True,
    )
    if printed is not None:
        printed.append(ran.stdout)
    started = folder / "started"
    return ran.returncode, started.read_text().splitlines() if started.exists() else []


@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        ("smoke", ["tests/gpu/test_smoke_on_cuda.py"]),
        (
            "checks",
            [
                "tests/gpu/test_engine_on_cuda.py",
                "bench/engine_check.py",
            ],
        ),
        ("backends", ["bench/engine.py"]),
        ("speed", ["bench/engine.py"]),
        ("sampling", ["bench/decode.py", "bench/sampler_refresh.py"]),
        ("peft", ["bench/engine.py"]),
        (
            "rehearse",
            [
                "tests/gpu",
                "bench/engine.py",
                "bench/decode.py",
                "bench/sampler_refresh.py",
                "bench/engine_check.py",
            ],
        ),
        ("all", ["tests/gpu/test_smoke_on_cuda.py"]),
    ],
)
def test_a_failed_part_does_not_stop_the_others(
    tmp_path: Path, name: str, scripts: Sequence[str]
) -> None:
    status, started = call(tmp_path, name, "exit 1")

    assert status == 1
    assert all(script in line for script, line in zip(scripts, started, strict=True))
    assert all((ROOT / script).exists() for script in scripts)


def test_the_calls_name_every_test_on_a_gpu() -> None:
    script = (ROOT / "bench/gpu_all.sh").read_text()

    assert all(
        f"tests/gpu/{each.name}" in script for each in (ROOT / "tests/gpu").glob("test_*.py")
    )


def test_an_unknown_call_starts_nothing(tmp_path: Path) -> None:
    assert call(tmp_path, "everything", "exit 0") == (2, [])


def test_the_call_all_starts_the_scripts_of_every_other_call(tmp_path: Path) -> None:
    parts = ["smoke", "checks", "backends", "speed", "sampling", "peft"]
    for part in parts:
        (tmp_path / part).mkdir()
    (tmp_path / "all").mkdir()
    one_by_one = [
        line.replace(f"/{part}/", "/")
        for part in parts
        for line in call(tmp_path / part, part, "exit 0")[1]
    ]

    status, started = call(tmp_path / "all", "all", "exit 0")

    assert status == 0
    assert [line.replace("/all/", "/") for line in started] == one_by_one


def test_failed_parts_are_listed_at_the_end(tmp_path: Path) -> None:
    printed: list[str] = []

    status, _ = call(
        tmp_path, "checks", "echo 'FAILED tests/gpu/x.py::test_y - no'; exit 1", printed
    )

    assert status == 1
    last = printed[0].splitlines()[-4:]
    names = ["gpu_tests", "engine_check"]
    assert [line.split()[:2] for line in last[::2]] == [["FAILED", name] for name in names]
    assert last[1::2] == ["FAILED tests/gpu/x.py::test_y - no"] * 2
