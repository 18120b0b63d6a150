"""Plain code in place of the attention kernel over pages, which checks the contract of its arguments."""

from __future__ import annotations

from typing import Any

import torch

from cotrain_workers.engine.decoding.page_kernel import PagesCall


def plain_pages(*args: Any) -> None:
    """Write what `page_kernel.attend_pages` writes, one query at a time."""
    call = PagesCall(*args)
    tables = {"spans": call.spans, "lengths": call.lengths, "pages": call.pages}
    assert all(each.dtype == torch.int32 for each in tables.values()), tables
    assert all(each.is_contiguous() for each in (call.keys, call.values, call.out, call.spans, call.lengths))
    assert call.pages.stride(1) == 1
    shared = call.q.shape[1] // call.keys.shape[2]
    for (first, count, sequence), length in zip(call.spans.tolist(), call.lengths.tolist(), strict=True):
        assert 1 <= count <= call.queries
        assert 1 <= length <= length + count - 1 <= call.longest
        for at in range(count):
            used = length + at
            table = call.pages[sequence, : -(-used // call.keys.shape[1])].long()
            k, v = (memory[table].flatten(0, 1)[:used] for memory in (call.keys, call.values))
            seen = slice(max(0, used - (call.window or used)), used)
            k, v = (x[seen].float().repeat_interleave(shared, 1) for x in (k, v))
            scores = torch.einsum("hd,khd->hk", call.q[first + at].float(), k) * call.scale
            if call.cap:
                scores = call.cap * torch.tanh(scores / call.cap)
            call.out[first + at] = torch.einsum("hk,khd->hd", scores.softmax(-1), v).to(call.out.dtype)
