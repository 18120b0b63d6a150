"""Lines of mutants. A mutant whose line has changed would test nothing, and fails here long before `make mutants`."""

from __future__ import annotations

import pytest

from tests.faults.mutants import MUTANTS
from tests.warm.sources import ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_the_lines_that_a_mutant_changes_are_in_the_sources(name: str) -> None:
    for edit in MUTANTS[name].edits:
        assert edit.old in (ROOT / edit.file).read_text(), edit.file
