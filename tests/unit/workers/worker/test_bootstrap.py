"""What a worker finds out before it enters its pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cotrain_workers.engine.ops import Pass
from cotrain_workers.worker.bootstrap import measure_throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_workers.engine.engine import Engine
    from cotrain_workers.engine.ops import Op


@pytest.mark.parametrize("num_tokens", [256, 1024])
def test_the_speed_is_that_of_as_many_tokens_as_are_asked_for_and_leaves_no_run(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    engine, trained = new_engine(), []
    run = engine.run

    def counted(ops: Sequence[Op]) -> object:
        trained.append(sum(len(d.tokens) for op in ops if isinstance(op, Pass) for d in op.datums))
        return run(ops)

    monkeypatch.setattr(engine, "run", counted)

    assert measure_throughput(engine, num_tokens) > 0
    assert trained == [0, num_tokens, num_tokens]
    assert "probe" not in engine.adapters
