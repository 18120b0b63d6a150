"""Pinned requirements of the cookbook."""

from __future__ import annotations

from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.cookbook.programs import COOKBOOK, ROOT


def names(path: Path) -> set[str]:
    lines = path.read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in found)
    return {canonicalize_name(pin.name) for pin in found}


def test_the_cookbook_installs_no_package_that_is_pinned_already() -> None:
    brought = names(Path(__file__).with_name("requirements.txt"))
    # the cookbook's folder comes first on the path
    assert not brought & names(ROOT / "constraints.txt")


def test_the_installed_version_matches_the_name_of_its_folder() -> None:
    wanted = (Path(__file__).with_name("requirements.txt")).read_text().splitlines()
    assert COOKBOOK.parent.name.replace("-", "==") in wanted
