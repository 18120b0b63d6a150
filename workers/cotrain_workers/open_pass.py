"""One op of a wave while its pieces run: what it has found so far, and where its gradient goes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from cotrain_workers.ops import Failure, PassOutput, ReverseKl, ReverseKlOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.bank import Adapter, Gradient
    from cotrain_workers.ops import Datum, KlDatum, Pass
    from cotrain_workers.pack import Piece


@dataclass
class OpenPass:
    """A pass in progress."""

    op: Pass | ReverseKl
    adapter: Adapter
    pieces_left: int = 0
    gradient: Gradient | None = None  # where its weight gradients go, once a piece has run
    found: list[np.ndarray] = field(default_factory=list)  # per datum: log-probs or divergences
    loss_sum: float = 0.0
    output: PassOutput | ReverseKlOutput | Failure | None = None

    def datums(self, piece: Piece) -> Sequence[Datum] | Sequence[KlDatum]:
        """Return the datums of one of this pass's pieces."""
        return self.op.datums[piece.first : piece.last]


def claim_gradient(adapter: Adapter) -> Gradient:
    """Return where an op may add its gradient: the adapter's own arena while that is clean, else scratch.

    An op that fails is then undone by zeroing the arena or dropping the scratch. Both start from zeros,
    so the bits of the sum do not depend on which it was.
    """
    if adapter.grads_pending or adapter.gradient_in_use:
        return adapter.scratch_gradient()
    adapter.gradient_in_use = True
    return adapter.gradient


def settle(done: OpenPass) -> None:
    """Accept a complete pass and keep its gradient, or fail it and leave no trace of it."""
    is_finite = math.isfinite(done.loss_sum) and all(np.isfinite(each).all() for each in done.found)
    if done.gradient is not None:
        is_finite = is_finite and is_all_finite(done.gradient.flat)
        settle_gradient(done.adapter, done.gradient, keep=is_finite)
        done.gradient = None
    done.output = output_of(done) if is_finite else not_finite(done.op)


def give_up(failed: OpenPass, failure: Failure) -> None:
    """Fail an incomplete pass and leave no trace of it."""
    if failed.gradient is not None:
        settle_gradient(failed.adapter, failed.gradient, keep=False)
        failed.gradient = None
    failed.output = failure


def output_of(done: OpenPass) -> PassOutput | ReverseKlOutput:
    """Return what a complete pass found."""
    if not isinstance(done.op, ReverseKl):
        return PassOutput(done.found, done.loss_sum)
    weights = [datum.weights for datum in done.op.datums]
    return ReverseKlOutput(
        losses=[w * kl for w, kl in zip(weights, done.found, strict=True)],
        loss_sum=done.loss_sum,
        kl_sum=float(sum(kl.sum(dtype=np.float64) for kl in done.found)),
        weighted_tokens=sum(int(np.count_nonzero(w)) for w in weights),
    )


def settle_gradient(adapter: Adapter, gradient: Gradient, *, keep: bool) -> None:
    """Add a claimed gradient to the adapter's, or drop it; those of earlier ops stay as they are."""
    is_own = gradient is adapter.gradient
    if is_own:
        adapter.gradient_in_use = False
    if keep:
        adapter.grads_pending = True
        if not is_own:
            adapter.gradient.flat.add_(gradient.flat)
    elif is_own:
        gradient.flat.zero_()


def is_all_finite(arena: torch.Tensor) -> bool:
    """Return whether an arena holds no NaN and no infinity. Waits for the device."""
    low, high = arena.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def needs_memory(tokens: int) -> Failure:
    """Return the answer to a pass with a datum of so many tokens that memory cannot hold it."""
    return Failure(f"Request needs more memory than the worker has ({tokens} tokens).", "server")


def not_finite(op: Pass | ReverseKl) -> Failure:
    """Return the answer to a pass whose loss, log-probabilities or gradient are not finite."""
    kept = "; the gradient was discarded" if op.needs_grad else ""
    return Failure(f"Loss is not finite (seq {op.seq}){kept}.", "user")
