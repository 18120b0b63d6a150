"""Where the gradient of an adapter is added up: an arena, in which what has been used counts as zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.spec import Sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.engine.spec import Layout


class Gradient:
    """A gradient arena and every module's matrices in it.

    To zero an arena is to write all of it. On a CPU, where that is dear, it becomes stale instead: products are
    written over it, and only what has none is zeroed, when the whole is asked for.
    """

    def __init__(self, arena: torch.Tensor, layout: Layout) -> None:
        self._arena = arena
        self._views = {name: Sums(*pair) for name, pair in layout.views(arena).items()}
        self._may_be_stale = False
        self._norm: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """Return the arena `[layout.size]`, to read or to write."""
        self._norm = None
        return self._settled()

    @property
    def views(self) -> dict[str, Sums]:
        """Return the matrices by module, to add to. Who does not ask for `kept_share` settles them before."""
        self._norm = None
        return self._views

    def settle(self) -> None:
        """Write zeros over what is stale."""
        self._settled()

    @property
    def is_cuda(self) -> bool:
        """Return whether it is on a GPU: there it is never stale."""
        return self._arena.is_cuda

    def discard(self) -> None:
        """Have it count as zeros."""
        if self.is_cuda:
            self._arena.zero_()
            return
        self._norm = None
        self._may_be_stale = True
        for sums in self._views.values():
            sums.is_stale = True

    def discard_unless(self, keep: torch.Tensor) -> None:
        """Have it count as zeros if the boolean `keep` is false; on CUDA without asking the host."""
        if self.is_cuda:
            self._arena.masked_fill_(~keep, 0.0)
        elif not keep:
            self.discard()

    def norm(self) -> torch.Tensor:
        """Return its L2 norm, added up in fp64, a scalar on the device.

        It is kept until someone asks for the arena, who may write to it.
        """
        if self._norm is None:
            self._norm = torch.linalg.vector_norm(self._settled(), dtype=torch.float64)
        return self._norm

    def is_finite(self) -> torch.Tensor:
        """Return whether there is no NaN and no infinity, by the norm. Waits for the device."""
        found = self.norm().isfinite()
        # Squares of fp64 may be too large where their roots are not.
        return found if found else self._settled().isfinite().all()

    def _settled(self) -> torch.Tensor:
        if self._may_be_stale:
            for sums in self._views.values():
                if sums.is_stale:
                    sums.a.zero_()
                    sums.b.zero_()
                    sums.is_stale = False
            self._may_be_stale = False
        return self._arena


def discard_all(gradients: Sequence[Gradient]) -> None:
    """Have gradients count as zeros; on CUDA in one launch."""
    on_cuda = [gradient for gradient in gradients if gradient.is_cuda]
    if on_cuda:
        torch._foreach_zero_([gradient.flat for gradient in on_cuda])
    for gradient in gradients:
        if not gradient.is_cuda:
            gradient.discard()
