"""Number of examples of a property test: a fixed third by default, or all in a search for more."""

from __future__ import annotations

from hypothesis import settings


def examples(many: int, at_least: int = 10) -> int:
    """Return `many` under `--hypothesis-profile=explore`, otherwise a third of it, which is the
    same in every run, and not less than `at_least`.
    """
    is_search = settings.get_current_profile_name() == "explore"
    return many if is_search else max(at_least, many // 3)
