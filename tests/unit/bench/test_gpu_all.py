from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.__main__ import scenarios
from tests.warm.popen import run

ROOT = Path(__file__).resolve().parents[3]
#: Scripts of the parts after the first, in the order of `all`.
MORE = (
    *("-m bench kernel_rates", "-m bench kernel_rates"),
    *("-m bench engine", "-m bench decode", "-m bench trainer_sampler", "tests/gpu", "-m bench engine_check"),
    *("-m bench engine", "-m bench engine", "-m bench sampler_refresh"),
)


def call(folder: Path, name: str, python: str, printed: list[str] | None = None) -> tuple[int, Sequence[str]]:
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
    lines = started.read_text().splitlines() if started.exists() else []
    return ran.returncode, [line for line in lines if line != "-c import xdist"]


@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        ("smoke", ["tests/gpu/test_smoke_on_cuda.py"]),
        ("kernels", ["-m bench kernel_rates", "-m bench kernel_rates"]),
        ("training", ["-m bench engine"]),
        ("decoding", ["-m bench decode"]),
        ("trainer_sampler", ["-m bench trainer_sampler"]),
        ("decoding,kernels", ["-m bench decode", "-m bench kernel_rates", "-m bench kernel_rates"]),
        ("checks", ["tests/gpu", "-m bench engine_check"]),
        ("peft", ["-m bench engine"]),
        ("memory", ["-m bench engine"]),
        ("refresh", ["-m bench sampler_refresh"]),
        (
            "rehearse",
            [
                *("tests/gpu", "-m bench engine", "-m bench decode", "-m bench trainer_sampler"),
                *("-m bench sampler_refresh", "-m bench engine_check"),
            ],
        ),
        ("all", ["tests/gpu/test_smoke_on_cuda.py", *MORE]),
    ],
)
def test_a_failed_part_does_not_stop_the_others(tmp_path: Path, name: str, scripts: Sequence[str]) -> None:
    status, started = call(tmp_path, name, "exit 1")

    assert status == 1
    assert all(script in line for script, line in zip(scripts, started, strict=True))
    assert (tmp_path / "out/logs.tgz").exists()
    names = [script.removeprefix("-m bench ") for script in scripts if script.startswith("-m")]
    assert set(names) <= scenarios().keys()


@pytest.mark.parametrize("name", ["everything", "smoke,everything", "smoke all"])
def test_an_unknown_call_starts_nothing(tmp_path: Path, name: str) -> None:
    assert call(tmp_path, name, "exit 0") == (2, [])
    assert not (tmp_path / "out").exists()


def test_a_lease_of_15_minutes_has_time_for_the_named_calls() -> None:
    """Each call takes 10 minutes at most, and both together leave two minutes for starts and transfers."""
    script = (ROOT / "bench/gpu_all.sh").read_text()
    seconds = [
        sum(limits(script, part) for part in each.split(",")) for each in re.findall(r"[a-z_,]+ \(\d+ s at", script)
    ]
    stated = [int(each) for each in re.findall(r"\((\d+) s at most\)", script)]

    assert seconds == stated
    assert max(seconds) <= 600
    assert sum(seconds) <= 900 - 120


def limits(script: str, part: str) -> int:
    """Return the seconds of a part at most."""
    body = script.split(f"\n{part.split(' ')[0]}() {{\n")[1].split("\n}")[0]
    return sum(map(int, re.findall(r"(?:part|engine|gpu_tests) (\d+)", body)))


def test_failed_parts_are_listed_at_the_end(tmp_path: Path) -> None:
    printed: list[str] = []

    status, _ = call(tmp_path, "checks", "echo reason; exit 1", printed)

    assert status == 1
    names = ["gpu_tests", "engine_check"]
    assert printed[0].splitlines()[-2:] == [f"FAILED {name} (see logs.tgz)" for name in names]
    assert printed[0].endswith((tmp_path / "out/summary.txt").read_text())


def test_a_failure_is_printed_before_the_run_ends(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        """
def test_a(): assert 1 == 2

def test_b(): raise SystemExit("stopped")
"""
    )

    ran = run(
        [
            *(sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path)),
            *("-p", "bench.support.instant_failures", "-p", "no:cacheprovider", str(tmp_path)),
        ],
        cwd=ROOT,
    )

    before = ran.stdout.split("= FAILURES =")[0]
    assert "FAILED test_two.py::test_a" in before
    assert "assert 1 == 2" in before
