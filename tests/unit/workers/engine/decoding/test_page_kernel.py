"""Attention over pages in Triton's interpreter, compared with dense attention in fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cotrain_workers.engine.decoding import page_kernel
from cotrain_workers.engine.decoding.page_kernel import kernel_is_right
from cotrain_workers.engine.model.configuration import KvShape
from tests.support.lora_problem import needs_kernels
from tests.support.page_problem import CPU, LENGTHS, Rule, assert_dense, attend, sequence

pytestmark = [
    needs_kernels,
    # NumPy computes here, and warns of NaN. A GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def test_tokens_of_any_length_attend_to_all_their_keys() -> None:
    assert_dense([sequence(length) for length in LENGTHS], Rule())


@pytest.mark.parametrize(("heads", "width"), [((3, 3), 64), ((8, 2), 80), ((8, 1), 96), ((7, 1), 16)])
def test_query_heads_share_keys(heads: tuple[int, int], width: int) -> None:
    assert_dense([sequence(length, 1, heads, width) for length in (17, 1090)], Rule())


@pytest.mark.parametrize(
    "rule",
    [
        Rule(cap=3.0),
        Rule(window=1),
        Rule(window=20),
        Rule(window=1100),
        Rule(1100, 3.0),
    ],
    ids=str,
)
def test_caps_and_windows(rule: Rule) -> None:
    assert_dense([sequence(length) for length in (1, 17, 1025, 2300)], rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    given = [sequence(length, width=32, dtype=dtype) for length in (1, 17, 1025)]

    assert_dense(given, Rule(cap=20.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [Rule(), Rule(20, 3.0)], ids=str)
def test_prompts(dtype: torch.dtype, rule: Rule) -> None:
    given = [sequence(length, n, dtype=dtype) for length, n in ((1, 1), (64, 64), (150, 22))]

    assert_dense(given, rule)


@pytest.mark.parametrize("queries", [1, 5])
def test_bits_depend_on_the_sequence_alone(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = sequence(2100, queries)
    rule = Rule(1900, 30.0)
    alone = attend([mine], rule)[0]
    broken = replace(sequence(1500, queries), k=torch.full((1500, 1, 16), torch.nan))
    others = [sequence(1024, queries), sequence(70, queries), broken]

    between = attend([*others[:2], mine, broken], rule, spare=9, seed=1)
    assert torch.equal(between[2], alone)
    assert torch.equal(between[1], attend([others[1]], rule)[0])
    assert between[3].isnan().all()
    # A graph's grid fits the longest context. One program may also compute several parts.
    assert torch.equal(attend([mine], rule, longest=20_000)[0], alone)
    monkeypatch.setattr(page_kernel, "PROGRAMS", 1)
    assert torch.equal(attend([mine], rule, longest=20_000, seed=2)[0], alone)


def test_parts_of_long_sequences_are_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_kernel, "MOST", 2)

    assert_dense([sequence(length) for length in (900, 2048, 2049, 5000)], Rule())


def test_an_overflow_is_visible() -> None:
    mine = sequence(70)
    mine.k[3] = math.inf

    assert attend([mine], Rule())[0].isnan().any()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "page"), [(torch.float32, 64), (torch.bfloat16, 16)])
def test_the_self_check_accepts_the_kernel(softcap: float | None, dtype: torch.dtype, page: int) -> None:
    assert kernel_is_right(KvShape(1, 2, 16), 4, page, CPU, dtype, softcap)
