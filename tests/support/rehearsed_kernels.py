# mypy: disable-error-code="no-untyped-call"
"""Kernels of CUDA only, replaced by plain code that checks their contracts. See `rehearsed_cuda.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support.plain_pages import plain_pages
from tests.support.rehearsed_tensor import OnDevice, arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rehearsed_cuda import Rehearsal

aten: Any = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16)
MULTIPROCESSORS = 132  # of an H100 or H200


def wide_mm(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the product of 16-bit matrices in fp32, which only CUDA has."""
    if func is not aten.mm.dtype:
        return play.compute(func, args, kwargs)
    left, right, dtype = args
    if not (left.dtype == right.dtype and left.dtype in NARROW and dtype == torch.float32):
        raise RuntimeError(f"mm: no product of {left.dtype} and {right.dtype} into {dtype}")
    return OnDevice(left.held.float() @ right.held.float())


def grouped_mm(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Return grouped products. The contract of the kernel is checked by torch itself, on the meta device."""
    left, right, ends = args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"]
    if not any(isinstance(each, OnDevice) for each in (left, right, ends)):
        return func(*args, **kwargs)
    assert all(isinstance(each, OnDevice) for each in (left, right, ends))
    if left.dtype == torch.bfloat16:
        func(*(each.held.to("meta") if each is ends else like(each) for each in (left, right, ends)))
    else:
        play.wait("grouped products without a kernel")
    if ends.dtype != torch.int32 or len(ends) > 1023:
        raise RuntimeError(f"grouped_mm: {len(ends)} ends of {ends.dtype}")
    if any(each.held.data_ptr() % 16 for each in (left, right)):
        raise RuntimeError("grouped_mm: a matrix does not start at a multiple of 16 bytes")
    offsets = ends.held.tolist()
    counts = [stop - start for start, stop in zip([0, *offsets], offsets, strict=False)]
    rows = left.shape[1] if right.dim() == 2 else left.shape[0]
    if min(counts) < 0 or offsets[-1] > rows:
        raise RuntimeError(f"grouped_mm: ends {offsets} of {rows} rows")
    if right.dim() == 3 and len(ends) != len(right):
        raise RuntimeError(f"grouped_mm: {len(ends)} groups, {len(right)} matrices")
    found = func(left.held, right.held, ends.held)
    if right.dim() == 3:
        found[offsets[-1] :] = torch.nan  # in no group, so undefined
    return OnDevice(found)


def like(tensor: OnDevice) -> torch.Tensor:
    """Return a tensor without values, of the same shape and strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def flash(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of the flash kernel for ragged batches."""
    given = arguments(func, args, kwargs)
    check_flash(given)
    q = given["query"].held
    out = torch.zeros_like(q)
    for span, keys, values, seen in spans(given):
        weights = probabilities(q[span], keys, seen, given["scale"])
        out[span] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    lse = torch.zeros(q.shape[1], q.shape[0])
    return OnDevice(out), OnDevice(lse), OnDevice(torch.zeros(2, dtype=torch.uint64))


def flash_backward(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the gradient of the flash kernel."""
    given = arguments(func, args, kwargs)
    q, k, v, slope = (given[name].held for name in ("query", "key", "value", "grad_out"))
    gq, gk, gv = (torch.zeros_like(each, dtype=torch.float32) for each in (q, k, v))
    sums = query_sums(len(given["cu_seq_q"].held) - 1, *q.shape)
    shared = q.shape[1] // k.shape[1]
    starts = given["cu_seq_q"].held.tolist()
    for at, (span, keys, values, seen) in enumerate(spans(given)):
        p = probabilities(q[span], keys, seen, given["scale"])
        g = slope[span].float()
        gp = torch.einsum("qhd,khd->hqk", g, values)
        gs = p * (gp - (gp * p).sum(-1, keepdim=True)) * given["scale"]
        rows = slice(starts[at], starts[at + 1])
        gq[span] = torch.einsum("hqk,khd->qhd", gs, keys)
        of_keys = torch.einsum("hqk,qhd->khd", gs, q[span].float())
        of_values = torch.einsum("hqk,qhd->khd", p, g)
        for total, part in ((gk, of_keys), (gv, of_values)):
            total[rows] = part.unflatten(1, (-1, shared)).sum(2)
    del sums
    return tuple(OnDevice(each.to(q.dtype)) for each in (gq, gk, gv))


def query_sums(sequences: int, tokens: int, heads: int, size: int) -> OnDevice:
    """Return fp32 memory for the sums of the queries' gradient, as FlashAttention 2 allocates it.

    In deterministic mode it has a part for each program that adds to the same rows.
    """
    splits = -(-MULTIPROCESSORS // (sequences * heads))
    parts = splits if torch.are_deterministic_algorithms_enabled() else 1
    return OnDevice(torch.empty(parts, tokens + 128 * sequences, heads, size))


def check_flash(given: dict[str, Any]) -> None:
    """Raise RuntimeError for inputs that the kernel refuses."""
    q, k = given["query"], given["key"]
    size = q.shape[-1]
    tables = [given[name] for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table")]
    wrong = {
        "types": not (q.dtype == k.dtype == given["value"].dtype and q.dtype in NARROW),
        "head size": bool(size % 8) or size > 256,
        "last stride": any(given[name].stride(-1) != 1 for name in ("query", "key", "value")),
        "tables": any(each is not None and (each.dtype != torch.int32 or not each.is_contiguous()) for each in tables),
        "pages": given.get("block_table") is not None,
        "counts": not all(isinstance(given[name], int) for name in ("max_q", "max_k")),
        "end": int(given["cu_seq_q"].held[-1]) != len(q),
    }
    if any(wrong.values()):
        raise RuntimeError(f"flash: {[name for name, is_so in wrong.items() if is_so]}")


def spans(given: dict[str, Any]) -> Iterator[tuple[slice, Any, Any, Any]]:
    """Yield for each sequence its queries, its keys and values per query head, and the attention mask."""
    q, k, v = (given[name].held for name in ("query", "key", "value"))
    ends = given["cu_seq_q"].held.tolist()
    window, right = given["window_size"]
    shared = q.shape[1] // k.shape[-2]
    for at in range(len(ends) - 1):
        span = slice(ends[at], ends[at + 1])
        keys, values = k[span], v[span]
        keys, values = (each.float().repeat_interleave(shared, 1) for each in (keys, values))
        back = torch.arange(len(keys) - (span.stop - span.start), len(keys))[:, None]
        back = back - torch.arange(len(keys))
        seen = torch.ones_like(back, dtype=torch.bool)
        if right >= 0:
            seen &= back >= -right
        if window >= 0:
            seen &= back <= window
        yield span, keys, values, seen


def probabilities(q: Any, keys: Any, seen: Any, scale: float) -> torch.Tensor:
    """Return attention weights `[heads, queries, keys]`."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def pages(play: Rehearsal, func: Any, args: Any, kwargs: Any) -> None:
    """Compute the attention kernel over pages."""
    held: list[Any] = [each.held if isinstance(each, OnDevice) else each for each in args]
    plain_pages(*held)
