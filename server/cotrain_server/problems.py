"""File of failing processes, written by the supervisor and read by the API."""

import json
from contextlib import suppress
from pathlib import Path

#: File name in the data folder.
FILE = "troubles.json"


def read_troubles(data_dir: Path) -> list[str]:
    """Return the supervisor's failing processes; empty without a supervisor or failures."""
    try:
        problems: dict[str, str] = json.loads((data_dir / FILE).read_text())
    except FileNotFoundError:
        return []
    return [f"{process}: {trouble}" for process, trouble in sorted(problems.items())]


def write_troubles(data_dir: Path, problems: dict[str, str]) -> None:
    """Write the failing processes and their problems."""
    partial = data_dir / f"{FILE}.tmp"
    # On a full disk Redis crashes repeatedly, but its supervisor must not: `/readyz` reports both.
    with suppress(OSError):
        partial.write_text(json.dumps(problems))
        partial.replace(data_dir / FILE)
