"""What a supervisor cannot keep running, written down for the API, which is another process."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

#: In the data folder.
FILE = "troubles.json"


def read_troubles(data_dir: Path) -> list[str]:
    """Read what the supervisor cannot keep running; empty without a supervisor, or where all is well."""
    try:
        problems: dict[str, str] = json.loads((data_dir / FILE).read_text())
    except FileNotFoundError:
        return []
    return [f"{process}: {trouble}" for process, trouble in sorted(problems.items())]


def write_troubles(data_dir: Path, problems: dict[str, str]) -> None:
    """Say what cannot be kept running, by process."""
    partial = data_dir / f"{FILE}.tmp"
    # On a full disk, where Redis dies again and again, its supervisor must not: `/readyz` reports both.
    with suppress(OSError):
        partial.write_text(json.dumps(problems))
        partial.replace(data_dir / FILE)
