"""Commit hooks: the commands of `make lint`, run from .venv, without downloads."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_hooks_run_what_make_lint_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repository,) = config["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    hooks = {hook["entry"].removeprefix(".venv/bin/").partition(" --")[0] for hook in repository["hooks"]}
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    linted = re.findall(r"^\t\$\(BIN\)/([a-z -]+?)(?: --.*| \.)?$", lint, re.MULTILINE)
    assert hooks == {"ruff check", "ruff format", "mypy", "lint-imports"} == {*linted}
