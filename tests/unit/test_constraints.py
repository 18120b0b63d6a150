"""Pinned versions: complete, equal to the tested ones, and used by every command."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
OF_OTHERS = r"nvidia-|cuda-|triton$|colorama$|httpx2-jsfetch$|(appnope|cffi|pycparser)$"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def asked_for() -> list[Requirement]:
    """Return every requirement in pyproject.toml for this Python, except our own extras."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    lines = [line for extra in extras for line in extra] + PROJECT["dependency-groups"]["dev"]
    found = [Requirement(line) for line in PROJECT["project"]["dependencies"] + lines]
    return [r for r in found if r.name != "cotrain" and (r.marker is None or r.marker.evaluate())]


def test_every_requirement_is_pinned_to_the_tested_version() -> None:
    pinned = pins()
    for requirement in asked_for():
        (pin,) = pinned[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "==", requirement
        assert requirement.specifier.contains(pin.version), requirement
        assert Version(version(requirement.name)).public == pin.version, requirement


def test_pins_have_no_build_tag_and_no_url() -> None:
    for pin in pins().values():
        assert pin.url is None
        assert "+" not in str(pin.specifier)


def test_the_install_command_of_the_readme_uses_the_pins() -> None:
    installs = re.findall(r"pip install [^`\n]*\[\w+\]", (ROOT / "README.md").read_text())
    assert installs
    assert all("-c constraints.txt" in line for line in installs)


def test_make_installs_only_torch_and_ourselves_without_hashes() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    unchecked = [
        line.split()[-1] for line in lines
        if "pip install" in line and "--require-hashes" not in line
    ]  # fmt: skip
    # The last two make an environment for rehearsals, with the versions of another machine.
    assert unchecked == ["torch", ".", "pins/gpu-machine.txt", '"numpy<2.4"']


def hashed(name: str) -> dict[str, tuple[str, list[str]]]:
    """Read a file of hashes: version and hashes by name."""
    text = (ROOT / "pins" / name).read_text().replace("\\\n", " ")
    rows = [line.partition(" --hash=") for line in text.splitlines() if not line.startswith("#")]
    found: dict[str, tuple[str, list[str]]] = {}
    for pin, _, hashes in rows:
        requirement = Requirement(pin)
        (specifier,) = requirement.specifier
        found[canonicalize_name(requirement.name)] = (specifier.version, re.findall(r"sha256:([0-9a-f]{64})\b", hashes))
    return found


def test_every_pin_except_torch_has_hashes() -> None:
    versions = {name: str(pin.specifier).removeprefix("==") for name, pin in pins().items()}
    del versions["torch"]
    known = hashed("hashes.txt")
    assert {name: known[name][0] for name in versions} == versions  # otherwise: make hashes
    assert all(hashes for _, hashes in known.values())
    assert hashed("pip.txt") == {"pip": known["pip"]}


def test_a_hash_without_a_pin_belongs_to_torch_or_another_platform() -> None:
    for name in hashed("hashes.txt").keys() - pins().keys():
        assert re.match(OF_OTHERS, name), name


def test_a_list_for_pip_includes_extras_of_extras() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "pins" / "requirements_of.py", "all"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = {*PROJECT["project"]["dependencies"]}
    wanted |= {line for extra in ("scheduler", "server", "workers") for line in extras[extra]}
    assert set(done.stdout.splitlines()) == {line for line in wanted if "cotrain[" not in line}
