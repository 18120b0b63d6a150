"""The parts of a decoder step on CUDA: the flash kernel over pages, and LoRA by grouped products.

Not run by the CPU tests; `tests/gpu` compares both with the plain parts, which run anywhere.
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
MAX_GROUPS = 1023  # of one grouped product

log = logging.getLogger(__name__)


def kernel_takes(weight: torch.Tensor, score_softcap: float | None) -> bool:
    """Return whether this torch's flash kernel can attend over pages for a model of this kind.

    If not on CUDA, the log says why.
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
    """Return whether the adapters of a step can be one grouped product per pool."""
    most = max((slot.pool.flat.shape[0] for slot in slots if slot is not None), default=0)
    has_them = hasattr(functional, "grouped_mm")
    return weight.is_cuda and weight.dtype in NARROW and has_them and most <= MAX_GROUPS


@dataclass(frozen=True)
class KernelTables:
    """Where `n` rows of `s` spans are stored, and what each span attends to."""

    kv_slots: torch.Tensor  # int64 [n]
    offsets: torch.Tensor  # int32 [s + 1]: where each span begins, and the end
    key_offsets: torch.Tensor  # int32 [s + 1]: where each one's pages would begin, side by side
    lengths: torch.Tensor  # int32 [s]: positions to attend to
    blocks: torch.Tensor  # int32 [s, pages]
    max_queries: int
    max_keys: int


def kernel_tables(spans: Sequence[Span], cache: KvCache, device: torch.device) -> KernelTables:
    """Build the tables of spans that lie side by side from row 0 on."""
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
    """Return where the pages of each of `spans` would begin if all had the most, and the end."""
    return torch.arange(spans + 1, dtype=torch.int32, device=device) * max_keys


class Contract(NamedTuple):
    """Which arguments a flash kernel over pages needs."""

    key_offsets: bool
    """Where each sequence's pages begin: wanted by FlashAttention 2, which never looks, refused by 3."""
    one_split: bool
    """That one sum goes over all of a sequence's keys; its bits then do not depend on its neighbours."""


#: FlashAttention 2 of torch 2.13 and of 2.12, and 3, which under deterministic algorithms splits no sum.
CONTRACTS = (Contract(True, True), Contract(True, False), Contract(False, False))


class KernelAttention:
    """Attention of a step in one kernel per layer."""

    def __init__(self, cache: KvCache, tables: KernelTables, contract: Contract) -> None:
        self._cache = cache
        self._tables = tables
        self._contract = contract

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape; rows that belong to no sequence become zero."""
        tables, n = self._tables, len(self._tables.kv_slots)
        self._cache.write(layer, tables.kv_slots, k[:n], v[:n])
        keys, values = self._cache.paged(layer)
        kernel = varlen_kernel()
        assert kernel is not None
        splits = {"num_splits": 1} if self._contract.one_split else {}
        # Of one query nothing lies to the right. With a bound there, FlashAttention 2 reads the keys once
        # for each head of queries; without, once for all that share them.
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
    ends: torch.Tensor  # int32 [slots]: where each slot's rows end, counted from `start`


class GroupedLora:
    """LoRA of a step with one grouped product per matrix and pool; idle slots are empty groups."""

    def __init__(self, groups: Sequence[Grouped]) -> None:
        self._groups = groups
        self._kept_x: torch.Tensor | None = None  # what was multiplied for siblings yet to come
        self._kept_lows: dict[str, list[torch.Tensor]] = {}

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place.

        Modules that read the same tensor `x` are multiplied with their A matrices together.
        """
        for group, low in zip(self._groups, self._take_lows(module, x), strict=True):
            product = functional.grouped_mm(low, group.pool.stacked_b(module), offs=group.ends)
            y[group.start : group.stop].add_(product[:, : y.shape[1]])

    def _take_lows(self, module: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x A^T` of each group, `[n, rank]`; the first sibling computes those of all."""
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
    """Group rows that are sorted by pool and slot; those of the base model alone come first."""
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
    """Return where the rows of each slot of a pool end, given the slots of all rows."""
    counts = [0] * pool.flat.shape[0]
    for index in indices:
        counts[index] += 1
    return list(accumulate(counts))
