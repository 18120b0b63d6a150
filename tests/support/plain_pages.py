"""Plain code in place of the attention kernel over pages, which checks the contract of its arguments."""

from __future__ import annotations

import torch


def plain_pages(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    spans: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    queries: int,
    longest: int,
    window: int | None,
    scale: float,
    cap: float,
) -> None:
    """Write what `page_kernel.attend_pages` writes, one query at a time."""
    tables = {"spans": spans, "lengths": lengths, "pages": pages}
    assert all(each.dtype == torch.int32 for each in tables.values()), tables
    assert all(each.is_contiguous() for each in (keys, values, out, spans, lengths))
    assert pages.stride(1) == 1
    assert sinks is None
    shared = q.shape[1] // keys.shape[2]
    for (first, count, sequence), length in zip(spans.tolist(), lengths.tolist(), strict=True):
        assert 1 <= count <= queries
        assert 1 <= length <= length + count - 1 <= longest
        for at in range(count):
            used = length + at
            table = pages[sequence, : -(-used // keys.shape[1])].long()
            k, v = (memory[table].flatten(0, 1)[:used] for memory in (keys, values))
            seen = slice(max(0, used - (window or used)), used)
            k, v = (x[seen].float().repeat_interleave(shared, 1) for x in (k, v))
            scores = torch.einsum("hd,khd->hk", q[first + at].float(), k) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            out[first + at] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(out.dtype)
