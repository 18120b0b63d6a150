"""What the cookbook is fetched with."""

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


def test_it_brings_nothing_that_is_installed_already() -> None:
    brought = names(Path(__file__).with_name("requirements.txt"))
    assert not brought & names(ROOT / "constraints.txt")  # it comes first on the path


def test_it_brings_the_version_that_its_folder_is_named_after() -> None:
    wanted = (Path(__file__).with_name("requirements.txt")).read_text().splitlines()
    assert COOKBOOK.parent.name.replace("-", "==") in wanted
