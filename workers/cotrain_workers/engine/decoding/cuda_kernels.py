"""CUDA implementation of a decoder step: flash attention over pages, and LoRA with grouped products.

The CPU tests do not run it. `tests/gpu` compares both with the plain implementations, which run anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.paged_attention import Span, positions
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.attention import NARROW, varlen_kernel, varlen_parameters
from cotrain_workers.engine.routing import AttentionRule

NEEDED = {"block_table", "seqused_k", "window_size", "scale", "enable_gqa"}
MAX_GROUPS = 1023  # per grouped product

log = logging.getLogger(__name__)


def kernel_takes(weight: torch.Tensor, score_softcap: float | None) -> bool:
    """Return True if the flash kernel of this torch can attend over pages for this kind of model.

    On CUDA, a negative result is logged with its reasons.
    """
    if not weight.is_cuda:
        return False
    reasons = {
        f"no kernel for {weight.dtype}": weight.dtype not in NARROW,
        "no kernel for a score cap": score_softcap is not None,
        f"torch {torch.__version__} has no flash kernel over pages": not varlen_parameters()
        >= NEEDED,
    }
    lacking = [reason for reason, is_so in reasons.items() if is_so]
    if lacking:
        log.warning("Decoding is slow here: %s", ", ".join(lacking))
    return not lacking


def groups_take(weight: torch.Tensor, slots: Sequence[Slot | None]) -> bool:
    """Return True if the adapters of a step can run as one grouped product per pool."""
    most = max((slot.pool.flat.shape[0] for slot in slots if slot is not None), default=0)
    has_them = hasattr(functional, "grouped_mm")
    return weight.is_cuda and weight.dtype in NARROW and has_them and most <= MAX_GROUPS


@dataclass(frozen=True)
class KernelTables:
    """Storage of `n` rows of `s` spans, and the keys of each span."""

    kv_slots: torch.Tensor  # int64 [n]
    offsets: torch.Tensor  # int32 [s + 1]: start of each span, and the end
    key_offsets: torch.Tensor  # int32 [s + 1]: start of each span's pages if all were contiguous
    lengths: torch.Tensor  # int32 [s]: positions to attend to
    blocks: torch.Tensor  # int32 [s, pages]
    max_queries: int
    max_keys: int


def kernel_tables(spans: Sequence[Span], cache: KvCache, device: torch.device) -> KernelTables:
    """Return the tables of contiguous spans that start at row 0."""
    size = cache.page_tokens
    counts = [len(positions(span)) for span in spans]
    pages = max(-(-span.stop // size) for span in spans)
    blocks = [[*span.pages[:pages], *[cache.dump] * (pages - len(span.pages))] for span in spans]
    kv_slots = [
        span.pages[at // size] * size + at % size for span in spans for at in positions(span)
    ]

    def int32(values: Any) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int32), device)

    return KernelTables(
        kv_slots=to_device(torch.tensor(kv_slots), device),
        offsets=int32(list(accumulate(counts, initial=0))),
        key_offsets=key_offsets(len(spans), pages * size, device),
        lengths=int32([span.stop for span in spans]),
        blocks=int32(blocks),
        max_queries=max(counts),
        max_keys=pages * size,
    )


def key_offsets(spans: int, max_keys: int, device: torch.device) -> torch.Tensor:
    """Return the start of each span's pages if every span had `max_keys` keys, and the end."""
    return torch.arange(spans + 1, dtype=torch.int32, device=device) * max_keys


class Contract(NamedTuple):
    """Arguments that a version of the flash kernel over pages needs."""

    key_offsets: bool
    """Start of each sequence's pages: required by FlashAttention 2, which ignores it, and refused by 3."""
    one_split: bool
    """One sum over all keys of a sequence; its bits then do not depend on its neighbours."""


#: FlashAttention 2 of torch 2.13 and of 2.12, then 3, which does not split sums in deterministic mode.
CONTRACTS = (Contract(True, True), Contract(True, False), Contract(False, False))


class KernelAttention:
    """Attention of a step with one kernel per layer."""

    def __init__(self, cache: KvCache, tables: KernelTables, contract: Contract) -> None:
        self._cache = cache
        self._tables = tables
        self._contract = contract

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape; rows without a sequence become zero."""
        tables, n = self._tables, len(self._tables.kv_slots)
        self._cache.write(layer, tables.kv_slots, k[:n], v[:n])
        keys, values = self._cache.paged(layer)
        kernel = varlen_kernel()
        assert kernel is not None
        splits = {"num_splits": 1} if self._contract.one_split else {}
        # A single query has no keys to its right. With a bound there, FlashAttention 2 reads the keys once
        # per query head; without a bound, once for all query heads that share them.
        right = -1 if tables.max_queries == 1 and rule.window is None else 0
        out: torch.Tensor = kernel(
            q[:n].contiguous(),
            keys,
            values,
            tables.offsets,
            tables.key_offsets if self._contract.key_offsets else None,
            tables.max_queries,
            tables.max_keys,
            scale=rule.scaling,
            window_size=((rule.window - 1) if rule.window else -1, right),
            enable_gqa=q.shape[1] != keys.shape[2],
            seqused_k=tables.lengths,
            block_table=tables.blocks,
            **splits,
        )
        if n == len(q):
            return out
        return torch.cat([out, out.new_zeros(len(q) - n, *out.shape[1:])])


class Grouped(NamedTuple):
    """Neighbouring rows of one pool, sorted by slot."""

    start: int
    stop: int
    pool: Pool
    ends: torch.Tensor  # int32 [slots]: end of each slot's rows, counted from `start`


class GroupedLora:
    """LoRA of a step with one grouped product per matrix and pool; idle slots are empty groups."""

    def __init__(self, groups: Sequence[Grouped]) -> None:
        self._groups = groups
        self._kept_x: torch.Tensor | None = None  # input of `_kept_lows`, which later siblings use
        self._kept_lows: dict[str, list[torch.Tensor]] = {}

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place.

        Modules that read the same tensor `x` share one product with their stacked A matrices.
        """
        for group, low in zip(self._groups, self._take_lows(module, x), strict=True):
            product = functional.grouped_mm(low, group.pool.stacked_b(module), offs=group.ends)
            y[group.start : group.stop].add_(product[:, : y.shape[1]])

    def _take_lows(self, module: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x A^T` of each group, `[n, rank]`; the first sibling computes it for all siblings."""
        if self._kept_x is not x or module not in self._kept_lows:
            self._kept_x, self._kept_lows = x, {}
            for group in self._groups:
                siblings = group.pool.layout.siblings[module]
                a = group.pool.stacked_a(siblings).transpose(1, 2)
                low = functional.grouped_mm(x[group.start : group.stop], a, offs=group.ends)
                for name, own in zip(siblings, low.chunk(len(siblings), dim=1), strict=True):
                    self._kept_lows.setdefault(name, []).append(own)
        found = self._kept_lows.pop(module, [])
        if not self._kept_lows:
            self._kept_x = None
        return found


def grouped_lora(slots: Sequence[Slot | None], device: torch.device) -> GroupedLora:
    """Return the LoRA groups of rows sorted by pool and slot; rows without an adapter come first."""
    groups, start = [], sum(slot is None for slot in slots)
    while start < len(slots):
        first = slots[start]
        assert first is not None
        own = [slot.index for slot in slots if slot is not None and slot.pool is first.pool]
        ends = to_device(torch.tensor(slot_ends(own, first.pool), dtype=torch.int32), device)
        groups.append(Grouped(start, start + len(own), first.pool, ends))
        start += len(own)
    return GroupedLora(groups)


def slot_ends(indices: Sequence[int], pool: Pool) -> list[int]:
    """Return the end of each slot's rows in a pool, given the slots of all rows."""
    counts = [0] * pool.flat.shape[0]
    for index in indices:
        counts[index] += 1
    return list(accumulate(counts))
