"""Make targets, and the existence of the files that they run."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def commands(*targets: str) -> str:
    """Return the commands that make would run with nothing built yet."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "--no-print-directory", *targets],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_the_default_target_lists_the_demo_and_the_tests() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"demo", "test"} <= {line.split()[0] for line in listed.splitlines() if line}


def test_every_script_and_module_of_a_target_exists() -> None:
    ran = commands(*TARGETS)
    assert "-m pytest -n 5" in ran
    for script in re.findall(r"(?<=\s)[\w/]+\.(?:py|sh)\b", ran):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"python -m ([\w.]+)", ran):
        assert find_spec(module) is not None, module
    for folder in re.findall(r"(?<=\s)tests/\w+(?=\s)", ran):
        assert (ROOT / folder).is_dir(), folder


@pytest.mark.parametrize(
    "target", ["demo", "test", "test-cookbook", "test-compose", "test-gpu", "lint", "bench", "bench-engine"]
)
def test_a_target_installs_its_packages_first(target: str) -> None:
    assert "install --quiet --no-deps --no-build-isolation --editable ." in commands(target)


@pytest.mark.parametrize("name", ["chromium", "chromium-browser"])
def test_the_browser_driver_is_installed_if_a_browser_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = tmp_path / name
    browser.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "--group dev --group browser" in commands("install")


def test_continuous_integration_runs_the_commands_of_a_developer() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().splitlines()[-1] == "make --jobs=2 lint test"
