"""Compose files and the Dockerfile as data, parsed as a container engine does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
INTERPOLATION = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}")


def read_compose(name: str) -> dict[str, Any]:
    """Parse one compose file, with anchors and merge keys resolved."""
    compose: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return compose


def interpolate(value: str) -> str:
    """Replace each variable by its default, as if none were set."""
    return INTERPOLATION.sub(lambda found: found["default"] or "", value)


def environment(service: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a service's process. A name without a value is only passed on."""
    given = service.get("environment", {}).items()
    return {name: interpolate(str(value)) for name, value in given if value is not None}


def module_of(command: list[str]) -> str:
    """Return the module that `python -m MODULE …` runs."""
    python, flag, module, *_ = command
    assert (python, flag) == ("python", "-m")
    return module


def dockerfile_instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments), with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [(instruction, arguments) for instruction, arguments in words]
