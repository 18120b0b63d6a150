"""From hidden states to logits and log-probabilities of some rows, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.device import unordered_writes
from cotrain_workers.engine.lora.segmented import add_product, wide_product

if TYPE_CHECKING:
    from cotrain_workers.engine.routing import Part


def raw_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits `[c, V]` of `hidden` `[c, d]`, before LoRA and cap; fp32 under a 16-bit base."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    product = wide_product if narrow else torch.mm
    return product(hidden, weight.t())


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return `softcap * tanh(logits / softcap)`, in place (Gemma 2); without a cap the logits."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def picked_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of `targets` `[c, K]`, and all probabilities `[c, V]`, in `out`."""
    peak = logits.amax(dim=-1, keepdim=True)
    picked = logits.gather(1, targets)
    probabilities = torch.softmax(logits, dim=-1, out=out)
    # logsumexp without another pass of exp: the largest probability is exp(peak - logsumexp).
    top = probabilities.amax(dim=-1, keepdim=True)
    return picked.sub_(peak).add_(top.log_()), probabilities


def logit_slope(
    probabilities: torch.Tensor, slope: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Turn probabilities `[c, V]`, which it overwrites, into d loss / d logits, given d loss / d logprob
    `[c, K]`: `d loss / d logit_v = sum_k slope_k (1[v = target_k] - p_v)`.
    """
    grad = probabilities.mul_(-slope.sum(dim=1, keepdim=True))
    # One column after the other: two columns of a row may name the same token, and adding both in one
    # call would need atomics on CUDA.
    for column in range(slope.shape[1]):
        at = targets[:, column : column + 1]
        with unordered_writes():
            grad.scatter_(1, at, grad.gather(1, at) + slope[:, column : column + 1])
    return grad


class Projection:
    """Some rows of a piece under the unembedding and the adapter's LoRA on it, and the way back.

    `c` rows, `V` the vocabulary. `logits` first, then `backward`, once each.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        softcap: float | None,
        part: Part | None,
        hidden: torch.Tensor,
        hidden_grad: torch.Tensor | None = None,
    ) -> None:
        self._weight = weight
        self._softcap = softcap
        self._part = part
        self._hidden = hidden
        self._hidden_grad = hidden_grad
        self._low: torch.Tensor | None = None  # A @ hidden^T, [rank, c]
        self._capped: torch.Tensor | None = None  # tanh(logits / softcap), [c, V]

    def logits(self) -> torch.Tensor:
        """Return a new tensor `[c, V]`, fp32 under a 16-bit base."""
        return self.adapted(raw_logits(self._hidden, self._weight))

    def backward(self, slope: torch.Tensor) -> None:
        """Given d loss / d logits `[c, V]`, which it overwrites, write d loss / d hidden and add the
        LoRA gradients.
        """
        grad = self.through_cap(slope).to(self._weight.dtype)
        self.finish(grad, torch.mm(grad, self._weight))

    def adapted(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply LoRA and cap to raw logits `[c, V]`, in place."""
        if self._part is not None:
            self._low = torch.mm(self._part.weights.a, self._hidden.t())
            add_product(logits, self._low.t(), self._part.weights.b.t(), self._part.scale)
        if self._softcap is not None and self._hidden_grad is not None:
            self._capped = torch.tanh(logits / self._softcap)
        return capped(logits, self._softcap)

    def through_cap(self, slope: torch.Tensor) -> torch.Tensor:
        """Turn d loss / d logits into that by the logits before the cap, in place."""
        return slope if self._capped is None else slope.mul_(1 - self._capped**2)

    def finish(self, grad: torch.Tensor, hidden_grad: torch.Tensor) -> None:
        """Given `grad`, d loss / d raw logits `[c, V]`, and its product with the weight `[c, d]`, write
        d loss / d hidden and add the LoRA gradients.
        """
        if self._part is not None:
            assert self._low is not None
            assert self._part.grads is not None
            low_grad = torch.mm(self._part.weights.b.t(), grad.t())  # [rank, c]
            hidden_grad.addmm_(low_grad.t(), self._part.weights.a, alpha=self._part.scale)
            add_product(self._part.grads.b, grad.t(), self._low.t(), self._part.scale)
            add_product(self._part.grads.a, low_grad, self._hidden, self._part.scale)
        assert self._hidden_grad is not None
        self._hidden_grad.copy_(hidden_grad)
