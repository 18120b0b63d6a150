"""How each command of the `tinker` command line is typed, and how it went."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tests.conformance.scoreboard.calls import PATIENCE_S, Outcome
from tests.conformance.scoreboard.marks import FAILED, REFUSED, SUPPORTED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.conformance.scoreboard.place import Place

ENTRY = "from tinker.cli.__main__ import main; main()"
STYLED = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Typed:
    """What is typed behind the command's name, and at its prompt."""

    arguments: tuple[str, ...] = ()
    prompted: str = ""
    first: str = ""
    """A command to run before this one, for what it leaves in the home folder."""


def _key() -> str:
    return os.environ["TINKER_API_KEY"] + "\n"


def _days() -> tuple[str, str]:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    ends = (today - timedelta(days=1), today)
    return (ends[0].strftime("%Y-%m-%dT%H:%M:%SZ"), ends[1].strftime("%Y-%m-%dT%H:%M:%SZ"))


COMMANDS: Mapping[str, Callable[[Place], Typed]] = {
    "auth login": lambda at: Typed(prompted=_key()),
    "auth logout": lambda at: Typed(first="auth login", prompted=_key()),
    "auth status": lambda at: Typed(),
    "auth whoami": lambda at: Typed(),
    "billing checkpoint-storage": lambda at: Typed(),
    "billing usage": lambda at: Typed(_days()),
    "checkpoint delete": lambda at: Typed((at.new_path(), "--yes")),
    "checkpoint download": lambda at: Typed((at.path, "--output", "downloads")),
    "checkpoint info": lambda at: Typed((at.path,)),
    "checkpoint list": lambda at: Typed(("--run-id", at.path and at.run_id)),
    "checkpoint publish": lambda at: Typed((at.new_path(),)),
    "checkpoint push-hf": lambda at: Typed((at.path, "--repo", "somebody/adapter")),
    "checkpoint set-ttl": lambda at: Typed((at.new_path(), "--ttl", "3600")),
    "checkpoint unpublish": lambda at: Typed((at.path,), first=f"checkpoint publish {at.path}"),
    "model list": lambda at: Typed(),
    "run info": lambda at: Typed((at.run_id,)),
    "run list": lambda at: Typed(),
    "session export-trace": lambda at: Typed((at.session_id, "--output", "trace.json")),
    "version": lambda at: Typed(),
}


def type_command(name: str, typed: Typed, home: Path) -> Outcome:
    """Run a command in a home folder of its own."""
    home.mkdir(parents=True)
    if typed.first:
        _run(typed.first.split(), typed.prompted, home)
    try:
        done = _run([*name.split(), *typed.arguments], typed.prompted, home)
    except subprocess.TimeoutExpired:
        return (FAILED, f"Did not end within {PATIENCE_S} s.")
    if done.returncode == 0:
        return (SUPPORTED, "")
    said = " ".join(STYLED.sub("", done.stderr).split())
    return (FAILED if "Traceback" in said or not said else REFUSED, said[-600:])


def _run(words: list[str], prompted: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENTRY, *words],
        cwd=home,
        env={**os.environ, "HOME": str(home)},
        input=prompted,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
