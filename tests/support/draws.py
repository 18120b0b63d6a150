"""How many examples a property is tried on: a third, as drawn every time, or all, in a search for more."""

from __future__ import annotations

from hypothesis import settings


def examples(many: int) -> int:
    """Return `many` under `--hypothesis-profile=explore`, else a third: every run repeats those."""
    return many if settings.get_current_profile_name() == "explore" else max(10, many // 3)
