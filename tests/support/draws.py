"""Number of examples of a property test: a fixed third by default, or all in a search for more."""

from __future__ import annotations

from hypothesis import settings


def examples(many: int) -> int:
    """Return `many` under `--hypothesis-profile=explore`, otherwise a third of it, which is the
    same in every run.
    """
    return many if settings.get_current_profile_name() == "explore" else max(10, many // 3)
