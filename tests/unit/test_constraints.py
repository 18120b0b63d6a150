"""The pinned versions: complete, the ones the tests run with, and used by every command."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def asked_for() -> list[Requirement]:
    """Everything pyproject.toml names for this Python, except our own extras."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [line for extra in extras for line in extra] + PROJECT["dependency-groups"]["dev"]
    found = [Requirement(line) for line in PROJECT["project"]["dependencies"] + lines]
    return [r for r in found if r.name != "cotrain" and (r.marker is None or r.marker.evaluate())]


@pytest.mark.parametrize("requirement", asked_for(), ids=lambda requirement: requirement.name)
def test_what_we_ask_for_is_pinned_to_what_the_tests_run_with(requirement: Requirement) -> None:
    (pin,) = pins()[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version)
    assert Version(version(requirement.name)).public == pin.version


def test_pins_name_no_build_no_place_and_no_index() -> None:
    for pin in pins().values():
        assert pin.url is None
        assert "+" not in str(pin.specifier)


@pytest.mark.parametrize("name", ["Makefile", "README.md", "Dockerfile"])
def test_every_command_that_installs_the_server_uses_the_pins(name: str) -> None:
    text = (ROOT / name).read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install [^`\n]*\[\w+\][^`\n]*", text)
    assert installs
    assert all(re.search(r"(--constraint|-c) constraints\.txt", line) for line in installs)
