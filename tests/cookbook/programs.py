"""Run programs of tinker_cookbook, unmodified, each in a separate process against a live server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.warm.popen import Popen, run

ROOT = Path(__file__).parents[2]
COOKBOOK = ROOT / ".sdk" / "tinker_cookbook-0.6.1" / "site-packages"
TIMEOUT_S = 240
NOWHERE = "http://127.0.0.1:9"
"""Unused proxy address: requests to the internet fail at once."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Ran:
    """Exit status, output and log folder of a program."""

    status: int
    """0, or minus the number of the signal that killed it."""
    output: str
    steps: Rows
    """Metrics of every step, in the order in which they were written."""
    checkpoints: Rows
    """Checkpoints that the program can resume from, oldest first."""

    def series(self, name: str) -> list[float]:
        """Return one metric of every step."""
        return [row[name] for row in self.steps]


@dataclass(frozen=True)
class Bench:
    """A server, one tenant's key, and the folder in which programs start."""

    address: str
    key: str
    data_dir: Path
    workshop: Path
    logs: Path

    def run(self, recipe: str, folder: str, **options: object) -> Ran:
        """Run a recipe to its end; `folder` is its log folder, from which it resumes if it exists."""
        with self._popen(recipe, folder, options) as program:
            try:
                said, _ = program.communicate(timeout=TIMEOUT_S)
            except BaseException:
                program.kill()
                raise
        return self._ran(program.returncode, said, folder)

    def run_and_kill(self, recipe: str, folder: str, at: str, **options: object) -> Ran:
        """Run a recipe until it prints a line that matches `at`, then kill it."""
        said = []
        with self._popen(recipe, folder, options) as program:
            assert program.stdout is not None
            for line in program.stdout:
                said.append(line)
                if re.search(at, line):
                    program.kill()
        return self._ran(program.returncode, "".join(said), folder)

    def run_script(self, script: Path, *arguments: str) -> str:
        """Run a script on the cookbook's library. Return its output."""
        done = run(
            [sys.executable, str(script), *arguments], cwd=self.workshop, env=self._environment(), timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def checkpoints(self, run: str) -> dict[str, dict[str, Any]]:
        """Return a run's checkpoints on the server, by path."""
        listed = self.get(f"training_runs/{run}/checkpoints")["checkpoints"]
        return {checkpoint["tinker_path"]: checkpoint for checkpoint in listed}

    def get(self, path: str) -> Any:
        """Send a GET request as the tenant."""
        url, headers = f"{self.address}/api/v1/{path}", {"X-API-Key": self.key}
        answer = httpx.get(url, headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complaints(self) -> list[str]:
        """List every line of the server's logs that reports an error or an answer of 5xx."""
        lines = [line for log in sorted(self.data_dir.glob("logs/*.log")) for line in log.read_text().splitlines()]
        return [line for line in lines if _is_complaint(line)]

    def _ran(self, status: int, output: str, folder: str) -> Ran:
        log = next(self.logs.glob(f"{folder}/**/metrics.jsonl"), self.logs / folder / "none").parent
        rows = _rows(log / "metrics.jsonl")
        steps = [row for row in rows if any(name.startswith("progress") for name in row)]
        return Ran(status, output, steps, _rows(log / "checkpoints.jsonl"))

    def _popen(self, recipe: str, folder: str, options: Mapping[str, object]) -> Popen:
        return Popen(
            self._command(recipe, folder, options),
            cwd=self.workshop,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _command(self, recipe: str, folder: str, options: Mapping[str, object]) -> Sequence[str]:
        if not COOKBOOK.is_dir():
            pytest.fail("tinker_cookbook is missing: run tests/cookbook/fetch.sh")
        # The classifier of images names a folder inside its own.
        name = "experiment_dir" if recipe.startswith("vlm_") else "log_path"
        chosen = {name: self.logs / folder, **options}
        return [
            *(sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}"),
            *(f"{name}={value}" for name, value in chosen.items()),
        ]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(COOKBOOK),
            "TINKER_BASE_URL": self.address,
            "TINKER_API_KEY": self.key,
            "HF_DATASETS_CACHE": str(self.logs / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "HTTPS_PROXY": NOWHERE,
            "OMP_NUM_THREADS": "1",
        }


def _rows(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _is_complaint(line: str) -> bool:
    if not line.startswith("{"):
        return line.startswith("Traceback")
    entry = json.loads(line)
    return entry["level"] in ("error", "critical") or entry.get("code", 0) >= 500


def run_of(path: str) -> str:
    """Return the run id of a checkpoint path."""
    return path.removeprefix("tinker://").split("/")[0]
