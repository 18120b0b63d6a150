"""Recipes of each command of the `tinker` command line, and their outcomes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.conformance.scoreboard.calls import PATIENCE_S, Outcome
from tests.conformance.scoreboard.marks import FAILED, REFUSED, SUPPORTED
from tests.conformance.scoreboard.place import Place

ENTRY = "import sys; sys.argv[0] = 'tinker'; from tinker.cli.__main__ import main; main()"
STYLED = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Typed:
    """Arguments and prompted input of a command, and its expected effects."""

    arguments: tuple[str, ...] = ()
    prompted: str = ""
    first: str = ""
    """Command to run before this one, as its preparation."""
    says: str = ""
    """Text that its output must contain."""
    leaves: str = ""
    """Pattern of files that must be in the home folder afterwards."""
    holds: Callable[[], bool] = lambda: True
    """Further condition that must hold afterwards."""
    environment: Mapping[str, str] = field(default_factory=dict)


def _days() -> tuple[str, str]:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    ends = (today - timedelta(days=1), today)
    return (ends[0].strftime("%Y-%m-%dT%H:%M:%SZ"), ends[1].strftime("%Y-%m-%dT%H:%M:%SZ"))


def _exchanging() -> dict[str, str]:
    return {"TINKER_BASE_URL": os.environ["EXCHANGING_BASE_URL"]}


def _pushed(at: Place) -> Typed:
    return Typed(
        (at.path, "--repo", "a/b"),
        environment={"HF_ENDPOINT": at.hub.address, "HF_TOKEN": "hf_token", "HF_HUB_OFFLINE": "0"},
        holds=lambda: {"adapter_config.json", "adapter_model.safetensors"} <= at.hub.files.keys(),
    )


def _unpublished(at: Place) -> Typed:
    path = at.new_path()
    return Typed((path,), first=f"checkpoint publish {path}")


COMMANDS: Mapping[str, Callable[[Place], Typed]] = {
    "auth login": lambda at: Typed(prompted=at.key, says="Logged in", leaves=".tinker/*.json"),
    "auth logout": lambda at: Typed(first="auth login", prompted=at.key, says="Removed"),
    "auth status": lambda at: Typed(says="Tinker accessible: yes"),
    "auth whoami": lambda at: Typed(says="User"),
    "auth whoami(where COTRAIN_JWT_AUTH=always)": lambda at: Typed(environment=_exchanging(), says="User"),
    "billing checkpoint-storage": lambda at: Typed(),
    "billing usage": lambda at: Typed(_days()),
    "checkpoint delete": lambda at: Typed((at.new_path(), "--yes"), says="Deleted 1"),
    "checkpoint download": lambda at: Typed(
        (at.path, "--output", "downloads"), leaves="downloads/*/adapter_model.safetensors"
    ),
    "checkpoint info": lambda at: Typed((at.path,), says="Rank 4"),
    "checkpoint list": lambda at: Typed(says="checkpoint"),
    "checkpoint publish": lambda at: Typed((at.new_path(),)),
    "checkpoint push-hf": _pushed,
    "checkpoint set-ttl": lambda at: Typed((at.new_path(), "--ttl", "3600")),
    "checkpoint unpublish": _unpublished,
    "model list": lambda at: Typed(says="tiny"),
    "run info": lambda at: Typed((at.run_id,), says="LoRA"),
    "run list": lambda at: Typed(says="training run"),
    "session export-trace": lambda at: Typed((at.session_id, "--output", "trace.json")),
    "version": lambda at: Typed(says="tinker"),
}


def type_command(name: str, typed: Typed, home: Path) -> Outcome:
    """Run a command in its own home folder."""
    home.mkdir(parents=True)
    if typed.first:
        _run(typed.first.split(), typed, home)
    try:
        done = _run([*name.partition("(")[0].split(), *typed.arguments], typed, home)
    except subprocess.TimeoutExpired:
        return (FAILED, f"Did not end within {PATIENCE_S} s.")
    if done.returncode == 0:
        return _judged(typed, done.stdout, home)
    said = _words(done.stderr)
    return (FAILED if "Traceback" in said or not said else REFUSED, said)


def _judged(typed: Typed, said: str, home: Path) -> Outcome:
    left = not typed.leaves or any(home.glob(typed.leaves))
    if typed.says in said and left and typed.holds():
        return (SUPPORTED, "")
    return (FAILED, f"Ended well, but said only: {_words(said)}")


def _words(output: str) -> str:
    return " ".join(STYLED.sub("", output).split())[-600:]


def _run(words: list[str], typed: Typed, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENTRY, *words],
        cwd=home,
        env={**os.environ, "HOME": str(home), "COLUMNS": "200", **typed.environment},
        input=typed.prompted and f"{typed.prompted}\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
