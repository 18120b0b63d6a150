"""Projection of hidden states to logits and log-probabilities of some rows, and its backward."""

import torch

from cotrain_workers.engine.device import unordered_writes
from cotrain_workers.engine.lora.segmented import add_product, wide_product
from cotrain_workers.engine.routing import Part
from cotrain_workers.engine.spec import kept_share


def raw_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits `[c, V]` of `hidden` `[c, d]` before LoRA and cap; fp32 for a 16-bit base."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    product = wide_product if narrow else torch.mm
    return product(hidden, weight.t())


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return `softcap * tanh(logits / softcap)`, in place (Gemma 2); without a cap, the logits."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def picked_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of `targets` `[c, K]`, and all probabilities `[c, V]`, in `out`."""
    peak = logits.amax(dim=-1, keepdim=True)
    picked = logits.gather(1, targets)
    probabilities = torch.softmax(logits, dim=-1, out=out)
    # logsumexp without another exp over all logits: the largest probability is exp(peak - logsumexp).
    top = probabilities.amax(dim=-1, keepdim=True)
    return picked.sub_(peak).add_(top.log_()), probabilities


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities of the `k` most probable tokens, int32 and float32 `[n, k]`.

    Equally probable tokens are ordered by id, and the lowest ids of the last place are included.
    """
    ids = _lowest_first(logits, k)
    logprobs, _ = picked_logprobs(logits, ids)
    return ids.int(), logprobs.float()


def _lowest_first(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the `k` largest logits per row, int64 `[n, k]`; equal ones by id.

    torch defines no order among equals. On CUDA it may change with the number of rows, and so with
    other requests of the batch.
    """
    least = logits.topk(k, dim=-1).values[:, -1:]
    size = logits.shape[-1]
    # All ids above the last value come before those with that value, and no two keys are equal.
    keys = torch.arange(size, dtype=torch.int32, device=logits.device).expand_as(logits)
    keys = torch.where(logits > least, keys - size, keys).masked_fill_(logits < least, size)
    ids = keys.topk(k, dim=-1, largest=False).indices.sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _logit_slope(probabilities: torch.Tensor, slope: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return d loss / d logits, given d loss / d logprob `[c, K]`; overwrites probabilities `[c, V]`.

    `d loss / d logit_v = sum_k slope_k (1[v = target_k] - p_v)`.
    """
    grad = probabilities.mul_(-slope.sum(dim=1, keepdim=True))
    # Columns one by one: two columns of a row may contain the same token, and adding both in one
    # call would need atomics on CUDA.
    for column in range(slope.shape[1]):
        at = targets[:, column : column + 1]
        with unordered_writes():
            grad.scatter_(1, at, grad.gather(1, at) + slope[:, column : column + 1])
    return grad


class Cap:
    """`softcap * tanh(logits / softcap)` (Gemma 2), in place, and its backward; the identity without a cap."""

    def __init__(self, softcap: float | None, *, goes_back: bool) -> None:
        self._softcap = softcap
        self._goes_back = goes_back
        self._tanh: torch.Tensor | None = None

    def on(self, logits: torch.Tensor) -> torch.Tensor:
        """Return capped logits, computed in place."""
        if self._softcap is not None and self._goes_back:
            self._tanh = torch.tanh(logits / self._softcap)
        return capped(logits, self._softcap)

    def back(self, slope: torch.Tensor) -> torch.Tensor:
        """Return d loss / d logits before the cap, given d loss / d logits after it."""
        return slope if self._tanh is None else slope.mul_(1 - self._tanh**2)


class PlainSoftmax:
    """Softmax of all rows of some logits `[rows, V]` before the cap, which it may overwrite.

    Gradients have the type `dtype`. Results of a row depend only on that row. PyTorch operations store all
    probabilities until they become the gradient.
    """

    def __init__(self, logits: torch.Tensor, softcap: float | None, dtype: torch.dtype, *, goes_back: bool) -> None:
        self._logits = logits
        self._softcap = softcap
        self._dtype = dtype
        self._goes_back = goes_back
        self._slopes = torch.empty_like(logits)  # probabilities, until `go_back` of a row
        self._cap_by_start: dict[int, Cap] = {}

    def logprobs(self, rows: slice, targets: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of `targets` `[c, K]`."""
        cap = self._cap_by_start[rows.start] = Cap(self._softcap, goes_back=self._goes_back)
        return picked_logprobs(cap.on(self._logits[rows]), targets, self._slopes[rows])[0]

    def go_back(self, rows: slice, targets: torch.Tensor, slope: torch.Tensor) -> None:
        """Compute the gradient of some rows, given d loss / d logprob `[c, K]`."""
        grad = _logit_slope(self._slopes[rows], slope, targets)
        self._cap_by_start[rows.start].back(grad)

    def gradient(self) -> torch.Tensor:
        """Return d loss / d logits `[rows, V]` before the cap; rows without `go_back` are undefined."""
        return self._slopes.to(self._dtype)


NewSoftmax = type[PlainSoftmax]


class Projection:
    """Projection of some rows by the unembedding and the adapter's LoRA on it, and its backward.

    There are `c` rows and `V` tokens in the vocabulary. Call `logits`, then `backward`, once each.
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
        self._cap = Cap(softcap, goes_back=hidden_grad is not None)
        self._part = part
        self._hidden = hidden
        self._hidden_grad = hidden_grad
        self._low: torch.Tensor | None = None  # A @ hidden^T, [rank, c]

    def logits(self) -> torch.Tensor:
        """Return a new tensor `[c, V]`, fp32 for a 16-bit base."""
        return self._cap.on(self.adapted(raw_logits(self._hidden, self._weight)))

    def backward(self, slope: torch.Tensor) -> None:
        """Write d loss / d hidden and add the LoRA gradients, given d loss / d logits `[c, V]`.

        Overwrites `slope`.
        """
        grad = self._cap.back(slope).to(self._weight.dtype)
        self.finish(grad, torch.mm(grad, self._weight))

    def adapted(self, logits: torch.Tensor) -> torch.Tensor:
        """Return raw logits `[c, V]` plus LoRA, in place."""
        if self._part is not None:
            self._low = torch.mm(self._part.weights.a, self._hidden.t())
            add_product(logits, self._low.t(), self._part.weights.b.t(), self._part.scale)
        return logits

    def finish(self, grad: torch.Tensor, hidden_grad: torch.Tensor) -> None:
        """Write d loss / d hidden and add the LoRA gradients.

        `grad` is d loss / d raw logits `[c, V]`, and `hidden_grad` its product with the weight `[c, d]`.
        """
        if self._part is not None:
            assert self._low is not None
            assert self._part.grads is not None
            low_grad = torch.mm(self._part.weights.b.t(), grad.t())  # [rank, c]
            hidden_grad.addmm_(low_grad.t(), self._part.weights.a, alpha=self._part.scale)
            share = kept_share(self._part.grads)
            add_product(self._part.grads.b, grad.t(), self._low.t(), self._part.scale, share)
            add_product(self._part.grads.a, low_grad, self._hidden, self._part.scale, share)
        assert self._hidden_grad is not None
        self._hidden_grad.copy_(hidden_grad)
