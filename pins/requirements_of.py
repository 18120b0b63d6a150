"""Print what the project and some of its extras ask for, one requirement a line.

    python pins/requirements_of.py server > requirements.txt

pip checks no hashes while it installs a project's own folder; of a list it checks them. What is there
already is not asked for again: torch, whose build has no hash, is installed before.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Follow extras that name other extras of this project; sorted, each once."""
    lines = {*project["dependencies"]}
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", line)
            lines |= {*requirements(project, own[1].split(","))} if own else {line}
    return sorted(lines)


if __name__ == "__main__":
    parsed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sys.stdout.write("\n".join(requirements(parsed["project"], sys.argv[1:])) + "\n")
