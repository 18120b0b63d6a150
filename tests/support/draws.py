"""Share of a table or of a property's examples that `make test` runs; other commands run the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings


def examples(many: int, at_least: int = 10) -> int:
    """Return `many` under `--hypothesis-profile=explore`, otherwise a third of it, which is the
    same in every run, and not less than `at_least`.
    """
    is_search = settings.get_current_profile_name() == "explore"
    return many if is_search else max(at_least, many // 3)


def variant(*values: Any) -> Any:
    """Return a row of `parametrize` that only `make test-variants` runs, because rows of `make test` run the same code."""
    return pytest.param(*values, marks=pytest.mark.variants)
