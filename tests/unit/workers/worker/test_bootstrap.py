"""Measurements of a worker before it enters its pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Op, Pass
from cotrain_workers.worker.bootstrap import known_batch_sizes, measure_throughput, remember_batch_size


@pytest.mark.parametrize("num_tokens", [256, 1024])
def test_the_throughput_is_measured_with_the_requested_tokens(
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


def test_a_measured_size_is_kept_for_later_processes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sizes.json"
    remember_batch_size(path, "H200, 8B", 8192)
    remember_batch_size(path, "H200, 4B", 12288)

    assert known_batch_sizes(path).get("H200, 8B") == 8192
    assert known_batch_sizes(path).get("H100, 8B") is None
    assert [each.name for each in path.parent.iterdir()] == ["sizes.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "many"}', "\x00"])
def test_a_broken_file_is_treated_like_a_missing_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(content)
    assert known_batch_sizes(path).get("a") is None

    remember_batch_size(path, "a", 1024)
    assert known_batch_sizes(path).get("a") == 1024
