"""Kernels of `layer_programs.py` as torch ops: norms, rotations and gates of layers, and the softmax over a vocabulary.

* `KeptNorm`: RMS norm that also returns its input, so that backward of the norm and the residual is one kernel.
* `RotatedNorm`: rotation of query or key heads after an optional RMS norm, in one kernel each way.
* `gated`: gated product of an MLP in one kernel, for decoding. In training it is part of the products, or plain.
* `KernelSoftmax`: two passes over the fp32 logits, for the norms and for the gradient. No probabilities are stored.
  The gradient has the dtype of the base model's weights.

The LoRA backend `fused` uses the softmax, and has the same requirements. `fused_layers.py` inserts the others.
"""

from functools import partial
from typing import Any

import torch
from typing_extensions import override

from cotrain_workers.engine.lora.fused.operators import GELU, no_result, register
from cotrain_workers.engine.model.kernel_check import TOLERANCE, agrees, apart, example
from cotrain_workers.engine.model.unembedding import NewSoftmax, PlainSoftmax

WARPS = 8
GATE_BLOCK, GATE_WARPS = 1024, 4  # values per program
COLUMNS = 4096  # of the logits that one program reads


class KeptNorm(torch.autograd.Function):
    """The norm of each row of `x` `[..., width]`, and `x` itself. The weight is frozen."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, one: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm and `x`."""
        ctx.save_for_backward(x, weight)
        ctx.rest = eps, one
        ctx.set_materialize_grads(False)  # an unused `x` has no gradient
        return torch.ops.cotrain.rms_norm(x.contiguous(), weight, eps, one), x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        x, weight = ctx.saved_tensors
        gy, kept = (None if each is None else each.contiguous() for each in grads)
        gx = torch.ops.cotrain.rms_norm_back(x.contiguous(), weight, gy, kept, *ctx.rest)
        return gx, None, None, None


class RotatedNorm(torch.autograd.Function):
    """`x` `[T, heads, size]`, each head normalised if there is a weight, and rotated by `cos` and `sin` `[T, size]`.

    The weight is frozen. Without a weight, the gradient does not need `x`, which is then not saved.
    """

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        one: bool,
    ) -> torch.Tensor:
        """Return the rotated heads, of the same shape."""
        x, cos, sin = (each.contiguous() for each in (x, cos, sin))
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin)
        ctx.rest = eps, one
        y: torch.Tensor = torch.ops.cotrain.rotated_norm(x, weight, cos, sin, eps, one)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        gy = grads[0].contiguous()
        gx = torch.ops.cotrain.rotated_norm_back(gy, *ctx.saved_tensors, *ctx.rest)
        return gx, *[None] * 5


def gated(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    """Return `act(gate) * up`; `kind` is SILU or GELU."""
    product: torch.Tensor = torch.ops.cotrain.gated(gate.contiguous(), up.contiguous(), kind)
    return product


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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, one: bool) -> torch.Tensor:
    """Return the norm of each row."""
    y = torch.empty_like(x)
    _run_norm("norm", x, weight, y, eps=eps, ONE=one)
    return y


def rms_norm_back(
    x: torch.Tensor, weight: torch.Tensor, gy: torch.Tensor, kept: torch.Tensor | None, eps: float, one: bool
) -> torch.Tensor:
    """Return the gradient of `x`, given the gradients of its norm and, if it was used, of `x` itself."""
    gx = torch.empty_like(x)
    given = x, weight, gy, gy if kept is None else kept, gx
    _run_norm("norm_backward", *given, eps=eps, ONE=one, PLUS=kept is not None)
    return gx


def rotated_norm(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float, one: bool
) -> torch.Tensor:
    """Return each head normalised and rotated."""
    return _run_rotation("rotated", [x, weight, cos, sin], eps, one, norm=weight is not None)


def rotated_norm_back(
    gy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    one: bool,
) -> torch.Tensor:
    """Return the gradient of `x`."""
    return _run_rotation("rotated_backward", [x, weight, cos, sin, gy], eps, one, norm=weight is not None)


def _gated(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    y = torch.empty_like(gate)
    _program("gated")[(-(-y.numel() // GATE_BLOCK),)](
        gate, up, y, y.numel(), GELU=kind == GELU, BLOCK=GATE_BLOCK, num_warps=GATE_WARPS
    )
    return y


def softmax_norms(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the largest logit of each row, and the sum of `exp(logit - largest)`: `[rows, 2]`."""
    norms = _new_norms(logits)
    _run_softmax("softmax_norms", (len(logits),), logits, norms, logits.shape[1], cap=cap, size=COLUMNS)
    return norms


def softmax_pick(
    logits: torch.Tensor, norms: torch.Tensor, targets: torch.Tensor, first: int, cap: float
) -> torch.Tensor:
    """Return the log-probabilities `[c, K]` of `targets`."""
    logprobs = _new_logprobs(logits, norms, targets)
    targets, (rows, count) = targets.contiguous(), targets.shape
    given = logits, norms, targets, logprobs, first, logits.shape[1], count
    _run_softmax("softmax_pick", (rows,), *given, cap=cap, size=block(count))
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
    _run_softmax("softmax_backward", (rows, -(-width // COLUMNS)), *given, cap=cap, size=COLUMNS)


def block(size: int) -> int:
    """Return the block size of a kernel for `size` values: the next power of two."""
    return 1 << (size - 1).bit_length()


def _run_norm(name: str, x: torch.Tensor, *rest: torch.Tensor, eps: float, **flags: bool) -> None:
    width = x.shape[-1]
    _program(name)[(x.numel() // width,)](x, *rest, width, eps, **flags, BLOCK=block(width), num_warps=WARPS)


def _run_rotation(name: str, given: list[torch.Tensor | None], eps: float, one: bool, *, norm: bool) -> torch.Tensor:
    like = given[0] if given[0] is not None else given[-1]
    assert like is not None
    (rows, heads, size), out = like.shape, torch.empty_like(like)
    _program(name)[(rows,)](
        *(like if each is None else each for each in given), out, heads, size // 2, eps,
        NORM=norm, ONE=one, HEADS=block(heads), HALF=block(size // 2), num_warps=WARPS,
    )  # fmt: skip
    return out


def _run_softmax(name: str, grid: tuple[int, ...], *given: Any, cap: float, size: int) -> None:
    _program(name)[grid](*given, cap, CAPPED=cap > 0, BLOCK=size, num_warps=WARPS)


def _program(name: str) -> Any:
    """Return a Triton program. Its module is imported only where kernels run."""
    from cotrain_workers.engine.model import layer_programs

    return getattr(layer_programs, name)


def _like_first(first: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(first)


def _new_norms(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(len(logits), 2)


def _new_logprobs(logits: torch.Tensor, _norms: Any, targets: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(targets.shape)


_GIVEN = "Tensor? weight, Tensor cos, Tensor sin"
register(
    {
        # x [T, width]; `one`: the scale is weight + 1
        "rms_norm": "(Tensor x, Tensor weight, float eps, bool one) -> Tensor",
        "rms_norm_back": "(Tensor x, Tensor weight, Tensor gy, Tensor? kept, float eps, bool one) -> Tensor",
        # x [T, heads, size], cos and sin [T, size]; no norm without a weight
        "rotated_norm": f"(Tensor x, {_GIVEN}, float eps, bool one) -> Tensor",
        "rotated_norm_back": f"(Tensor gy, Tensor? x, {_GIVEN}, float eps, bool one) -> Tensor",
        "gated": "(Tensor gate, Tensor up, int kind) -> Tensor",
        # `logits` are fp32 [rows, V]. A `cap` of 0 stands for no softcap.
        "softmax_norms": "(Tensor logits, float cap) -> Tensor",
        # `targets` [c, K] are K columns of each of the c rows from `first` on.
        "softmax_pick": "(Tensor logits, Tensor norms, Tensor targets, int first, float cap) -> Tensor",
        "softmax_backward": "(Tensor logits, Tensor norms, Tensor targets, Tensor slopes, Tensor(a!) grads, int first, "
        "float cap) -> ()",
    },
    (rms_norm, rms_norm_back, rotated_norm, rotated_norm_back, _gated, softmax_norms, softmax_pick, softmax_backward),
    (*[_like_first] * 5, _new_norms, _new_logprobs, no_result),
)
