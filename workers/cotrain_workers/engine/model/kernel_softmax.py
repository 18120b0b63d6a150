"""Softmax over the vocabulary by kernels that pass over the fp32 logits twice: for the norms, and for the gradient.

No probabilities are stored. The gradient has the dtype of the base model's weights. The LoRA backend `fused` uses it,
and has the same requirements.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from cotrain_workers.engine.model.kept_norm import block
from cotrain_workers.engine.model.kernel_check import TOLERANCE, agrees, apart, example
from cotrain_workers.engine.model.unembedding import NewSoftmax, PlainSoftmax

#: Columns of the logits that one kernel program reads, and its warps.
COLUMNS, WARPS = 4096, 8

_LIBRARY = torch.library.Library("cotrain", "FRAGMENT")
SCHEMAS = {
    # `logits` are fp32 [rows, V]. A `cap` of 0 stands for no softcap.
    "softmax_norms": "(Tensor logits, float cap) -> Tensor",
    # `targets` [c, K] are K columns of each of the c rows from `first` on.
    "softmax_pick": "(Tensor logits, Tensor norms, Tensor targets, int first, float cap) -> Tensor",
    "softmax_backward": "(Tensor logits, Tensor norms, Tensor targets, Tensor slopes, Tensor(a!) grads, int first, "
    "float cap) -> ()",
}


class KernelSoftmax(PlainSoftmax):
    """Softmax by kernels. The logits must be final when it is created."""

    def __init__(self, logits: torch.Tensor, softcap: float | None, dtype: torch.dtype, *, goes_back: bool) -> None:
        self._logits = logits
        self._cap = softcap or 0.0
        self._norms = torch.ops.cotrain.softmax_norms(logits, self._cap)
        self._grads = torch.empty_like(logits, dtype=dtype) if goes_back else None

    @override
    def logprobs(self, rows: slice, targets: torch.Tensor) -> torch.Tensor:
        given = self._logits, self._norms, targets, rows.start, self._cap
        found: torch.Tensor = torch.ops.cotrain.softmax_pick(*given)
        return found

    @override
    def go_back(self, rows: slice, targets: torch.Tensor, slope: torch.Tensor) -> None:
        given = self._logits, self._norms, targets, slope, self._grads
        torch.ops.cotrain.softmax_backward(*given, rows.start, self._cap)

    @override
    def gradient(self) -> torch.Tensor:
        assert self._grads is not None
        return self._grads


def find_softmax(weight: torch.Tensor, softcap: float | None) -> NewSoftmax:
    """Return the kernel softmax for an unembedding `[V, d]` if it is correct on its device, else the plain one.

    Raises DeviceLost.
    """
    # A comparison in the 16 bits of the weights alone would hide errors of the gradient.
    for dtype in dict.fromkeys((torch.float32, weight.dtype)):
        measure = partial(disagreement, weight, softcap, dtype)
        if not agrees("The softmax in two passes", weight.device, TOLERANCE[dtype], measure):
            return PlainSoftmax
    return KernelSoftmax


def disagreement(weight: torch.Tensor, softcap: float | None, dtype: torch.dtype) -> float:
    """Return the largest relative difference of kernel and plain softmax on random logits.

    Gradients have the type `dtype`.
    """
    targets = torch.tensor([[0, len(weight) - 1], [1, 1], [0, 1]], device=weight.device)
    slopes = torch.tensor([[1.0, -0.5], [2.0, 0.5], [0.0, 0.0]], device=weight.device)
    logits = 4 * example(weight, len(targets), len(weight)).float()
    found = []
    for softmax in (KernelSoftmax, PlainSoftmax):
        own = softmax(logits.clone(), softcap, dtype, goes_back=True)
        rows = slice(0, len(targets))
        logprobs = own.logprobs(rows, targets)
        own.go_back(rows, targets, slopes)
        found.append([logprobs, own.gradient()])
    return apart(*found)


def softmax_norms(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the largest logit of each row, and the sum of `exp(logit - largest)`: `[rows, 2]`."""
    norms = _new_norms(logits)
    _launch("softmax_norms", (len(logits),), logits, norms, logits.shape[1], cap=cap, size=COLUMNS)
    return norms


def softmax_pick(
    logits: torch.Tensor, norms: torch.Tensor, targets: torch.Tensor, first: int, cap: float
) -> torch.Tensor:
    """Return the log-probabilities `[c, K]` of `targets`."""
    logprobs = _new_logprobs(logits, norms, targets)
    targets, (rows, count) = targets.contiguous(), targets.shape
    given = logits, norms, targets, logprobs, first, logits.shape[1], count
    _launch("softmax_pick", (rows,), *given, cap=cap, size=block(count))
    return logprobs


def softmax_backward(
    logits: torch.Tensor,
    norms: torch.Tensor,
    targets: torch.Tensor,
    slopes: torch.Tensor,
    grads: torch.Tensor,
    first: int,
    cap: float,
) -> None:
    """Write into `grads` the gradient of the logits of the c rows from `first` on."""
    (rows, count), width = targets.shape, logits.shape[1]
    given = logits, norms, targets.contiguous(), slopes.contiguous(), grads, first, width, count
    _launch("softmax_backward", (rows, -(-width // COLUMNS)), *given, cap=cap, size=COLUMNS)


def _launch(name: str, grid: tuple[int, ...], *given: Any, cap: float, size: int) -> None:
    from cotrain_workers.engine.model import layer_programs

    program = getattr(layer_programs, name)
    program[grid](*given, cap, CAPPED=cap > 0, BLOCK=size, num_warps=WARPS)


def _new_norms(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(len(logits), 2)


def _new_logprobs(logits: torch.Tensor, _norms: Any, targets: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(targets.shape)


def _nothing(*_: Any) -> None:
    pass


_REAL: tuple[Callable[..., Any], ...] = (softmax_norms, softmax_pick, softmax_backward)
_FAKE: tuple[Callable[..., Any], ...] = (_new_norms, _new_logprobs, _nothing)
for (_name, _schema), _real, _fake in zip(SCHEMAS.items(), _REAL, _FAKE, strict=True):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cotrain::{_name}", _fake, lib=_LIBRARY)
