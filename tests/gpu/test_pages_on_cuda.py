"""The attention kernel over pages on CUDA, which the CPU tests run in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cotrain_workers.engine.decoding.page_attention import kernel as page_kernel
from tests.support.page_problem import (
    LENGTHS,
    Case,
    Rule,
    assert_dense,
    attend,
    problem,
    sequence,
    sinks,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
HEADS = {128: (32, 8), 256: (8, 4), 96: (4, 4), 16: (7, 1)}
RULES = [Rule(), Rule(window=20), Rule(1100, 30.0)]


def case(
    length: int, queries: int = 1, width: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Case:
    return sequence(length, queries, HEADS[width], width, dtype)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("width", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tokens_and_prompts(dtype: torch.dtype, width: int, rule: Rule) -> None:
    own = replace(rule, sinks=sinks(HEADS[width][0]) if rule.cap else None)

    assert_dense([case(length, 1, width, dtype) for length in LENGTHS], own, CUDA)
    prompts = [(1, 1), (64, 64), (1500, 150), (70, 5)]
    assert_dense([case(length, n, width, dtype) for length, n in prompts], own, CUDA)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_depend_on_the_sequence_alone(
    queries: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, rule = case(2100, queries, dtype=dtype), Rule(1900, 30.0, sinks(32))
    alone = attend([mine], rule, device=CUDA)[0]
    broken = case(1500, queries, dtype=dtype)
    broken.k.fill_(torch.nan)
    others = [case(length, queries, dtype=dtype) for length in range(50, 1100, 50)]

    for seed in range(3):
        found = attend([*others, mine, broken], rule, spare=9, seed=seed, device=CUDA)
        assert torch.equal(found[-2], alone)
        assert torch.equal(found[0], attend([others[0]], rule, device=CUDA)[0])
        assert found[-1].isnan().all()
    monkeypatch.setattr(page_kernel, "PROGRAMS", 1)
    assert torch.equal(attend([mine], rule, longest=20_000, device=CUDA)[0], alone)


def test_a_graph_takes_other_lengths_and_pages() -> None:
    settings: dict[str, Any] = {"longest": 4096, "device": CUDA}
    one = problem([case(1025), case(17), case(2500)], Rule(), seed=0, **settings)
    two = problem([case(17), case(2500), case(1025)], Rule(), seed=1, **settings)
    page_kernel.attend(*two)
    expected = two[3].clone()
    page_kernel.attend(*one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        page_kernel.attend(*one)

    for ours, theirs in zip(one, two, strict=True):
        if isinstance(ours, torch.Tensor):
            ours.copy_(theirs)
    one[3].fill_(torch.nan)
    graph.replay()

    assert torch.equal(one[3], expected)
