"""Sequences whose keys lie in pages at random, and their attention by the kernel and densely in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cotrain_workers.engine.decoding import page_kernel
from cotrain_workers.engine.decoding.page_kernel import PagesCall

CPU = torch.device("cpu")
PAGE = 64
LENGTHS = (1, 15, 16, 17, 1023, 1024, 1025, 3000)
#: Relative to the largest value of a row. Probabilities are rounded to the type of the values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Rule:
    """Options of the kernel."""

    window: int | None = None
    cap: float = 0.0


@dataclass(frozen=True)
class Case:
    """Queries at the end of a sequence, `[n, heads, d]`, and all keys and values, `[length, kv heads, d]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def dense(self, rule: Rule) -> torch.Tensor:
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        if rule.cap:
            scores = rule.cap * torch.tanh(scores / rule.cap)
        back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        seen = (back >= 0) & (back < (rule.window or len(k)))
        scores = scores.masked_fill(~seen, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def sequence(length: int, queries: int = 1, heads: tuple[int, int] = (4, 1), width: int = 16,
             dtype: torch.dtype = torch.float32) -> Case:  # fmt: skip
    g = torch.Generator().manual_seed(length)
    sizes = [(queries, heads[0], width), *[(length, heads[1], width)] * 2]
    q, k, v = (torch.randn(size, generator=g).to(dtype) for size in sizes)
    return Case(3 * q, k, v)


def problem(
    given: Sequence[Case],
    rule: Rule,
    *,
    spare: int = 1,
    seed: int = 0,
    longest: int | None = None,
    device: torch.device = CPU,
) -> PagesCall:
    """Return arguments of the kernel for pages that lie at random; memory of no sequence is NaN."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-len(each.k) // PAGE) for each in given]
    found = torch.randperm(sum(counts) + spare, generator=g).split([*counts, spare])
    q, k = torch.cat([each.q for each in given]), given[0].k
    memory = torch.full((2, sum(counts) + spare, PAGE, *k.shape[1:]), torch.nan, dtype=k.dtype)
    table = torch.full((len(given), max(counts) + spare), 2**30, dtype=torch.int32)
    step = max(len(each.q) for each in given)
    if step > 1:
        step = page_kernel.queries_per_block(q.shape[1] // k.shape[1], k.dtype.itemsize)
    blocks, row = [], 0
    for at, (each, pages) in enumerate(zip(given, found, strict=False)):
        table[at, : len(pages)] = pages
        for own, x in zip(memory, (each.k, each.v), strict=True):
            for page, part in zip(pages.tolist(), x.split(PAGE), strict=True):
                own[page, : len(part)] = part
        first = len(each.k) - len(each.q)
        for start in range(0, len(each.q), step):
            count = min(step, len(each.q) - start)
            blocks.append((row + start, count, at, first + start + 1))
        row += len(each.q)
    tables = torch.tensor(blocks, dtype=torch.int32)
    spans, lengths = tables[:, :3].contiguous(), tables[:, 3].contiguous()
    longest = longest or max(len(each.k) for each in given)
    tensors = [q, *memory, torch.full_like(q, torch.nan), spans, lengths, table]
    scale = q.shape[2] ** -0.5
    return PagesCall._make([*(each.to(device) for each in tensors), step, longest, rule.window, scale, rule.cap])


def attend(given: Sequence[Case], rule: Rule, **settings: Any) -> list[torch.Tensor]:
    """Return the attention of sequences by the kernel."""
    call = problem(given, rule, **settings)
    page_kernel.attend(*call)
    return list(call.out.cpu().split([len(each.q) for each in given]))


def assert_dense(given: Sequence[Case], rule: Rule, device: torch.device = CPU) -> None:
    """Check the kernel's results of each sequence."""
    for each, found in zip(given, attend(given, rule, device=device), strict=True):
        expected = each.dense(rule)
        gap = (found.double() - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
        assert float(gap.max()) < TOLERANCE[each.k.dtype], len(each.k)
