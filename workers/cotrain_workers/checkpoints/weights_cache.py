"""Saved weights in host memory that are on disk as well: those used least recently leave first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import WeightsRef
    from cotrain_workers.engine.ops import HostWeights


class WeightsCache:
    """Holds no more than `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._weights: OrderedDict[WeightsRef, HostWeights] = OrderedDict()

    def get(self, ref: WeightsRef) -> HostWeights | None:
        """Return weights that are here, now the most recently used."""
        if ref not in self._weights:
            return None
        self._weights.move_to_end(ref)
        return self._weights[ref]

    def put(self, ref: WeightsRef, weights: HostWeights) -> None:
        """Keep weights, as long as there is memory."""
        self._weights[ref] = weights
        kept_bytes = sum(each.bytes for each in self._weights.values())
        while kept_bytes > self._limit_bytes:
            _, oldest = self._weights.popitem(last=False)
            kept_bytes -= oldest.bytes

    def drop(self, ref: WeightsRef) -> None:
        """Forget weights. Twice is harmless."""
        self._weights.pop(ref, None)
