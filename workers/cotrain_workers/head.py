"""Log-probabilities of the targets and the gradient of the hidden states, in one visit of each chunk.

No `[T, vocabulary]` tensor exists. Chunks never cross a piece and their boundaries depend on the piece
alone, so neither log-probabilities nor the head's LoRA gradients depend on a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cotrain_workers.lora import add_product, wide_product
from cotrain_workers.losses import value, value_and_slope

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cotrain_workers.losses import LossSpec
    from cotrain_workers.route import Part


@dataclass(frozen=True)
class HeadInput:
    """One piece as the head sees it: `n` rows, `K` targets per row."""

    hidden: torch.Tensor  # [n, d]
    targets: torch.Tensor  # int64 [n, K]
    inputs: Mapping[str, torch.Tensor]  # each [n, K]
    datum_lengths: Sequence[int]  # adds up to n
    loss: LossSpec
    config: Mapping[str, float]
    part: Part | None  # the adapter's LoRA on the head
    hidden_grad: torch.Tensor | None  # [n, d], zero; filled if the piece needs a gradient


@dataclass(frozen=True)
class HeadResult:
    """What the head found for one piece."""

    found: torch.Tensor  # [n, K]: log-probabilities; or [n]: divergences
    loss: torch.Tensor  # float64 scalar


class Head:
    """The frozen unembedding `weight` `[vocabulary, d]`, which may be tied to the input embedding."""

    def __init__(self, weight: torch.Tensor, softcap: float | None, chunk_rows: int) -> None:
        self._weight = weight
        self._softcap = softcap
        self._chunk_rows = chunk_rows

    @torch.no_grad()
    def run(self, given: HeadInput) -> HeadResult:
        """Evaluate the loss of a piece; if it needs a gradient, fill `hidden_grad` and add the LoRA's."""
        if given.hidden_grad is None:
            return self._forward(given)
        if given.loss.per_token:
            return self._one_pass(given)
        return self._two_passes(given)

    def _forward(self, given: HeadInput) -> HeadResult:
        logprobs = torch.cat([self._visit(given, rows).logprobs for rows in self._chunks(given)])
        totals = [
            value(given.loss, logprobs[rows], loss_inputs(given, rows), given.config)
            for rows in (self._chunks(given) if given.loss.per_token else datum_rows(given))
        ]
        return HeadResult(logprobs, torch.stack(totals).sum())

    def _one_pass(self, given: HeadInput) -> HeadResult:
        found, totals = [], []
        for rows in self._chunks(given):
            chunk = self._visit(given, rows)
            inputs = loss_inputs(given, rows)
            total, slope = value_and_slope(given.loss, chunk.logprobs, inputs, given.config)
            chunk.backward(slope)
            found.append(chunk.logprobs)
            totals.append(total)
        return HeadResult(torch.cat(found), torch.stack(totals).sum())

    def _two_passes(self, given: HeadInput) -> HeadResult:
        """Compute all log-probabilities, then the loss of each datum, then visit the chunks again."""
        logprobs = torch.cat([self._visit(given, rows).logprobs for rows in self._chunks(given)])
        both = [
            value_and_slope(given.loss, logprobs[rows], loss_inputs(given, rows), given.config)
            for rows in datum_rows(given)
        ]
        slope = torch.cat([each for _, each in both])
        for rows in self._chunks(given):
            self._visit(given, rows).backward(slope[rows])
        return HeadResult(logprobs, torch.stack([total for total, _ in both]).sum())

    def _chunks(self, given: HeadInput) -> Iterator[slice]:
        for start in range(0, len(given.targets), self._chunk_rows):
            yield slice(start, start + self._chunk_rows)

    def _visit(self, given: HeadInput, rows: slice) -> Chunk:
        grad = None if given.hidden_grad is None else given.hidden_grad[rows]
        projection = Projection(self._weight, self._softcap, given.part, given.hidden[rows], grad)
        return Chunk(projection, given.targets[rows])


def datum_rows(given: HeadInput) -> Iterator[slice]:
    """Yield the rows of each datum."""
    start = 0
    for length in given.datum_lengths:
        yield slice(start, start + length)
        start += length


def loss_inputs(given: HeadInput, rows: slice) -> dict[str, torch.Tensor]:
    """Return the loss inputs of some rows."""
    return {name: values[rows] for name, values in given.inputs.items()}


def raw_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits `[c, V]` of `hidden` `[c, d]`, before LoRA and cap; fp32 under a 16-bit base."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    product = wide_product if narrow else torch.mm
    return product(hidden, weight.t())


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return `softcap * tanh(logits / softcap)`, in place (Gemma 2); without a cap the logits."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def picked_logprobs(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of `targets` `[c, K]`, and all probabilities `[c, V]`."""
    peak = logits.amax(dim=-1, keepdim=True)
    picked = logits.gather(1, targets)
    probabilities = torch.softmax(logits, dim=-1)
    # logsumexp without another pass of exp: the largest probability is exp(peak - logsumexp).
    top = probabilities.amax(dim=-1, keepdim=True)
    return picked.sub_(peak).add_(top.log_()), probabilities


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
        logits = raw_logits(self._hidden, self._weight)
        if self._part is not None:
            self._low = torch.mm(self._part.weights.a, self._hidden.t())
            add_product(logits, self._low.t(), self._part.weights.b.t(), self._part.scale)
        if self._softcap is not None and self._hidden_grad is not None:
            self._capped = torch.tanh(logits / self._softcap)
        return capped(logits, self._softcap)

    def backward(self, slope: torch.Tensor) -> None:
        """Given d loss / d logits `[c, V]`, which it overwrites, write d loss / d hidden and add the
        LoRA gradients.
        """
        if self._capped is not None:
            slope.mul_(1 - self._capped**2)
        grad = slope.to(self._weight.dtype)
        hidden_grad = torch.mm(grad, self._weight)
        if self._part is not None:
            assert self._low is not None
            assert self._part.grads is not None
            low_grad = torch.mm(self._part.weights.b.t(), grad.t())  # [rank, c]
            hidden_grad.addmm_(low_grad.t(), self._part.weights.a, alpha=self._part.scale)
            add_product(self._part.grads.b, grad.t(), self._low.t(), self._part.scale)
            add_product(self._part.grads.a, low_grad, self._hidden, self._part.scale)
        assert self._hidden_grad is not None
        self._hidden_grad.copy_(hidden_grad)


class Chunk:
    """Some rows of a piece, visited: the log-probabilities of their targets, and the way back."""

    logprobs: torch.Tensor  # of the targets, [c, K], fp32 (fp64 under an fp64 base)

    def __init__(self, projection: Projection, targets: torch.Tensor) -> None:
        self._projection = projection
        self._targets = targets
        self.logprobs, self._probabilities = picked_logprobs(projection.logits(), targets)

    def backward(self, slope: torch.Tensor) -> None:
        """Given d loss / d logprob `[c, K]`, pass d loss / d logits on.

        `d loss / d logit_v = sum_k slope_k (1[v = target_k] - p_v)`.
        """
        grad = self._probabilities.mul_(-slope.sum(dim=1, keepdim=True))
        # One column after the other: two columns of a row may name the same token, and adding both in
        # one call would need atomics on CUDA.
        for column in range(slope.shape[1]):
            at = self._targets[:, column : column + 1]
            grad.scatter_(1, at, grad.gather(1, at) + slope[:, column : column + 1])
        self._projection.backward(grad)
