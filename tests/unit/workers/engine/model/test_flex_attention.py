"""Flex attention as it is without a compiler, which has no backward on a CPU: tests/gpu has the rest."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from cotrain_workers.engine.model import attention as attn
from cotrain_workers.engine.model import attention_check as attn_check
from cotrain_workers.engine.model import flex_attention as flex
from cotrain_workers.engine.routing import AttentionRule
from cotrain_workers.engine.sequence_table import SequenceTable, blocks_needed

LENGTHS = [(17, 5, 40, 40, 1, 33), (300, 129, 1, 1, 250, 127, 128, 128), (1000,), (5,), (128, 128)]
WINDOWS = [None, 1, 16, 200, 1000]


def visible(lengths: tuple[int, ...], window: int | None) -> np.ndarray:
    """Return bool `[T, T]`: may the row's token look at the column's?"""
    ends = np.cumsum([0, *lengths])
    seen = np.zeros((ends[-1], ends[-1]), dtype=bool)
    for start, stop in pairwise(ends):
        at = np.arange(stop - start)
        back = at[:, None] - at
        seen[start:stop, start:stop] = (back >= 0) & (back < (window or len(at)))
    return seen


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_are_visited_if_and_only_if_anything_in_them_is_seen(
    lengths: tuple[int, ...], window: int | None
) -> None:
    seen = visible(lengths, window)

    first, full_from, full_to = blocks_needed(lengths, window)

    for query in range(len(first)):
        for key in range(len(first)):
            block = seen[query * 128 : (query + 1) * 128, key * 128 : (key + 1) * 128]
            assert block.any() == (first[query] <= key <= query)
            assert (block.all() and key < query) == (full_from[query] <= key < full_to[query])


@pytest.mark.parametrize("lengths", LENGTHS[:2])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_the_dense_path(
    lengths: tuple[int, ...], window: int | None, softcap: float | None
) -> None:
    table = SequenceTable(lengths, torch.device("cpu"))
    rule = AttentionRule(scaling=0.2, window=window, softcap=softcap)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 16, generator=generator) for heads in (4, 2, 2))

    ours = flex.attention(q, k, v, table, rule)

    sizes = [group.sequences * group.length for group in table.equal_lengths]
    rows = zip(table.equal_lengths, *(torch.split(x, sizes) for x in (q, k, v)), strict=True)
    theirs = torch.cat([attn.attend(group, a, b, c, table, rule) for group, a, b, c in rows])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # fp32, sums of up to 1,000
    unlike = flex.attention(q, k, v, table, AttentionRule(0.2, window, 4.0))
    assert (unlike - theirs).abs().max() > 1e-3


def test_its_own_check_knows_right_from_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flex.is_right.cache_clear()
    rule, shape = AttentionRule(0.2, 64, 5.0), (4, 2, 16)

    def check(attend: object) -> bool:
        flex.is_right.cache_clear()
        monkeypatch.setattr(flex, "attend", attend)
        return flex.is_right(torch.device("cpu"), torch.float32, shape, rule)

    assert check(lambda q, k, v, mask, rule: attn_check.dense(q, k, v, rule))
    assert not caplog.records
    wider = AttentionRule(0.2, 65, 5.0)
    assert not check(lambda q, k, v, mask, rule: attn_check.dense(q, k, v, wider))
    assert "is not used for" in caplog.text
    flex.is_right.cache_clear()


def test_a_cpu_and_plain_attention_have_no_use_for_it() -> None:
    q = torch.zeros(8, 4, 16, dtype=torch.bfloat16)

    assert not flex.takes(q, q, AttentionRule(0.2, 16, 5.0))


def test_a_mask_is_made_once_for_all_layers() -> None:
    table = SequenceTable((40, 24), torch.device("cpu"))

    assert table.block_mask(None) is table.block_mask(None)
    assert table.block_mask(None) is not table.block_mask(16)
