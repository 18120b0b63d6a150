from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cotrain_workers.worker.batch_size_cache import BatchSizeCache

if TYPE_CHECKING:
    from pathlib import Path


def test_a_size_outlives_the_process_that_measured_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sizes.json"
    BatchSizeCache(path).remember("H200, 8B", 8192)
    BatchSizeCache(path).remember("H200, 4B", 12288)

    assert BatchSizeCache(path).tokens("H200, 8B") == 8192
    assert BatchSizeCache(path).tokens("H100, 8B") is None
    assert [each.name for each in path.parent.iterdir()] == ["sizes.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "many"}', "\x00"])
def test_a_broken_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(content)
    assert BatchSizeCache(path).tokens("a") is None

    BatchSizeCache(path).remember("a", 1024)
    assert BatchSizeCache(path).tokens("a") == 1024
