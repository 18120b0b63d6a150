"""What a member holds, read off its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_workers.engine.host_memory import resident_bytes
from cotrain_workers.group.messages import MemberFacts

if TYPE_CHECKING:
    from cotrain_workers.engine.engine import Engine


def facts_of(engine: Engine) -> MemberFacts:
    """Look, between cycles."""
    adapters = engine.adapters
    return MemberFacts(
        runs=adapters.runs,
        open_passes=engine.open_passes.ids,
        by_tier=adapters.by_tier,
        offloaded=adapters.offloaded,
        over_budget=adapters.over_budget(),
        memory_bytes=resident_bytes(),
    )
