"""The weights of the sequences that run: on the device for as long as one of them needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_workers.engine.decoding.adapter_slots import Slot, WeightSlots


class PinnedWeights:
    """Slots by the key of their weights; the base model alone, None, needs no slot."""

    def __init__(self, weights: WeightSlots) -> None:
        self._weights = weights
        self.slots: dict[str | None, Slot | None] = {None: None}

    def pin(self, key: str | None) -> bool:
        """Keep weights for one sequence more; False while there is no room for them.

        Raises:
            WeightsGone, WeightsNotFinite, WeightsUnfit: as `WeightSlots.pin`.
        """
        if key is not None:
            slot = self._weights.pin(key)
            if slot is None:
                return False
            self.slots[key] = slot
        return True

    def unpin(self, key: str | None) -> None:
        """Keep weights for one sequence less."""
        if key is not None:
            self._weights.unpin(key)
            slot = self.slots[key]
            if slot is not None and not slot.users:
                del self.slots[key]  # else it would keep the memory of a pool that was given up
