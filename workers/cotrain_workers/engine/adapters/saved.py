"""What a save gives: weights on their way to the host, which any thread may wait for."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from cotrain_workers.engine.ops import HostWeights

if TYPE_CHECKING:
    from cotrain_workers.engine.adapters.adapter import Adapter
    from cotrain_workers.engine.adapters.copy_streams import HostArenas


class SavedWeights(HostWeights):
    """The weights of an adapter as they are now."""

    _arriving: HostArenas | None
    _adapter: weakref.ref[Adapter]
    _version: int
    _bytes: int

    def __init__(self, adapter: Adapter, arriving: HostArenas) -> None:
        values: dict[str, Any] = {
            "spec": adapter.spec,
            "_arriving": arriving,
            "_adapter": weakref.ref(adapter),
            "_version": adapter.version,
            "_bytes": arriving.bytes,
        }
        self.__dict__.update(values)  # it is frozen

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[explicit-override]
        """Be plain weights in another process, which waits until they have arrived."""
        return HostWeights, (self.spec, self.flat)

    @cached_property
    def flat(self) -> torch.Tensor:  # type: ignore[explicit-override]
        """The weights, once they have arrived."""
        arriving = self._arriving
        if arriving is None:  # another thread asked in between
            return self.flat
        flat = arriving.whole()["weights"].float()
        self.__dict__["flat"] = flat
        self.__dict__["_arriving"] = None  # the blocks are free for other copies
        return flat

    @property
    def bytes(self) -> int:  # type: ignore[explicit-override]
        """Return the size of the weights."""
        return self._bytes

    def on_device(self) -> torch.Tensor | None:  # type: ignore[explicit-override]
        """Return the adapter's own arena while it holds these weights."""
        adapter = self._adapter()
        if adapter is None or adapter.version != self._version or adapter.on_host is not None:
            return None
        if adapter.weights.dtype != torch.float32:
            return None
        adapter.hold_compute()
        return adapter.weights
