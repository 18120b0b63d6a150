"""What a cycle is made of, as plain data: the ops that go into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.spec import AdapterSpec


@dataclass(frozen=True)
class Datum:
    """One example: `n` tokens and what the loss reads with them.

    `inputs["target_tokens"]` is int64 `[n]` or `[n, K]`; every other input is float32 of that shape.
    """

    tokens: np.ndarray  # int64 [n]
    inputs: Mapping[str, np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what is found of it: one value per target."""
        return self.inputs["target_tokens"].shape


@dataclass(frozen=True)
class KlDatum:
    """One example of a reverse KL: a continuation of `n` tokens after two contexts.

    Both sequences are a context and the continuation without its last token, which is predicted only:
    target `i` is predicted at row `-n + i` of each.
    """

    tokens: np.ndarray  # int64: what the run reads
    reference: np.ndarray  # int64: what the reference reads
    weights: np.ndarray  # float32 [n], n >= 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what is found of it: one value per target."""
        return self.weights.shape


@dataclass(frozen=True)
class Create:
    """Start a run with a fresh adapter."""

    run: str
    seq: int
    spec: AdapterSpec


@dataclass(frozen=True)
class Pass:
    """Evaluate a loss on datums; with `needs_grad`, add its gradient to the run's (summed, never averaged)."""

    run: str
    seq: int
    datums: Sequence[Datum]
    loss_fn: str
    loss_config: Mapping[str, float]
    needs_grad: bool
    slice_tokens: int | None = None
    """Most tokens of its slices where memory holds no larger ones: its sums then have other last bits. None: no limit."""


@dataclass(frozen=True)
class ReverseKl:
    """Add up `weight * KL(run || reference)` over whole distributions, and its gradient to the run's.

    Both are softmaxes of logits / `temperature`. The reference is never differentiated.
    """

    run: str
    seq: int
    datums: Sequence[KlDatum]
    reference: HostWeights | None  # None: the base model alone
    temperature: float
    slice_tokens: int | None = None
    """As of a `Pass`."""
    needs_grad: ClassVar[bool] = True


@dataclass(frozen=True)
class OptimStep:
    """Take one AdamW step with the run's summed gradient, then zero it; a `grad_clip_norm` of 0 is no limit."""

    run: str
    seq: int
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True)
class Save:
    """Copy a run's weights to the host, as they are after its ops so far; `optimizer` its state, too."""

    run: str
    seq: int
    optimizer: bool = False


@dataclass(frozen=True)
class HostOptimizer:
    """The AdamW state of an adapter on the host, in the arena layout of `spec`."""

    spec: AdapterSpec
    m: torch.Tensor  # fp32 [layout.size]
    v: torch.Tensor  # fp32 [layout.size]
    step: int  # optimizer steps taken


@dataclass(frozen=True)
class Load:
    """Put `weights` in place of the run's; a pending gradient is gone, and AdamW goes on or starts anew.

    With `creates` the run begins with them, and takes its spec from them.
    """

    run: str
    seq: int
    path: str  # what the tenant calls the checkpoint; for messages
    weights: HostWeights
    optimizer: HostOptimizer | None  # None: zero moments, step 0
    creates: bool = False


@dataclass(frozen=True)
class PeftModule:
    """The LoRA matrices of one module of a `PeftAdapter`: `W + scale * B @ A`."""

    name: str  # its path in the Hugging Face model
    a: str  # name of the tensor [rank, inputs]; `rank` is at most that of the run
    b: str  # name of the tensor [outputs, rank]
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that PEFT wrote, and what it becomes."""

    spec: AdapterSpec
    modules: Sequence[PeftModule]
    tensors: bytes  # a safetensors file of those tensors, perhaps of the base model's embeddings, and of nothing else


@dataclass(frozen=True)
class Import:
    """Start a run with an adapter that was made elsewhere."""

    run: str
    seq: int
    adapter: PeftAdapter


Op = Create | Import | Pass | ReverseKl | OptimStep | Save | Load


@dataclass(frozen=True)
class CreateOutput:
    """A run was created."""

    trainable_parameters: int


@dataclass(frozen=True)
class PassOutput:
    """What a pass found: log-probabilities of the targets, one float32 array per datum, in order."""

    logprobs: Sequence[np.ndarray]  # each of the shape of its datum's target_tokens
    loss_sum: float


@dataclass(frozen=True)
class ReverseKlOutput:
    """What a reverse KL found; a target of weight 0 counts nowhere."""

    losses: Sequence[np.ndarray]  # per datum float32 [n]: weight * divergence of each target
    loss_sum: float
    kl_sum: float  # of the divergences themselves
    weighted_tokens: int


@dataclass(frozen=True)
class StepOutput:
    """What an optimizer step found."""

    grad_norm: float  # global L2 norm over the run's gradient, before clipping


@dataclass(frozen=True)
class SaveOutput:
    """The copy; later ops of the run leave it as it is."""

    weights: HostWeights
    optimizer: HostOptimizer | None = None  # as asked for


@dataclass(frozen=True)
class LoadOutput:
    """The run's state was replaced by that of a checkpoint."""

    path: str


@dataclass(frozen=True)
class Failure:
    """The op changed nothing; `message` may be shown to the tenant."""

    message: str
    category: Literal["user", "server"]
    code: Literal["not_finite", "too_large"] | None = (
        None  # what is treated apart; no client sees it
    )


Output = (
    CreateOutput | PassOutput | ReverseKlOutput | StepOutput | SaveOutput | LoadOutput | Failure
)


@dataclass(frozen=True)
class Progress:
    """How far a pass has come that takes several cycles, in tokens that the base model read for it."""

    now: int  # in this cycle
    in_all: int


class UpcomingBatch(NamedTuple):
    """The size of a micro-batch that runs next."""

    largest: tuple[str, int]
    """The op with most of its tokens, by (run, seq)."""
    tokens: int
    longest: int
    """Tokens of its longest datum."""
    needs_grad: bool


@dataclass(frozen=True)
class CyclePart:
    """A part of a cycle, in s of the wall clock; at its yield points others may have worked."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class CycleOutput:
    """What one cycle did, and what it cost."""

    outputs: Mapping[tuple[str, int], Output]
    """By (run, seq): one for every op of the cycle, but for passes that stay open and what is deferred
    behind them."""
    forwards: int  # passes of the base model
    tokens: int
    padded_tokens: int  # tokens plus the filler of every micro-batch
    wave_s: float  # forward/backward, without what others took at its yield points
    optim_s: float
    is_exact: bool = True  # False: memory ran out so that an op has other last bits than with more
    divided: Mapping[tuple[str, int], Progress] = field(default_factory=dict)
    """Of passes that stay open, or did so in a cycle before; those without an output are open."""
    parts: Sequence[CyclePart] = ()
    """Its waves and optimizer steps, in order."""

    @cached_property
    def open_tokens(self) -> dict[tuple[str, int], int]:
        """Return the passes that stay open, each with its tokens that have run."""
        return {at: each.in_all for at, each in self.divided.items() if at not in self.outputs}


def unknown_run() -> Failure:
    """Return the answer to an op of a run that has no adapter: the op that makes it has failed."""
    return Failure("This run has no adapter: its creation failed. Create another run.", "user")


class WeightsMissing(KeyError):
    """Nothing holds the weights of this key any more, or what holds them cannot be used."""

    def __init__(self, key: str, reason: str = "") -> None:
        super().__init__(key)
        self.reason = reason
        """Why, for whom they belong to; empty where that is not known."""


@dataclass(frozen=True)
class HostWeights:
    """Sampler weights on the host, in the arena layout of `spec`."""

    spec: AdapterSpec
    flat: torch.Tensor  # fp32 [layout.size]

    @property
    def bytes(self) -> int:
        """Return the size of `flat`, for which it need not have arrived."""
        return self.flat.nbytes

    def on_device(self) -> torch.Tensor | None:
        """Return the same values on the device, where an adapter still has them there; read-only."""
        return None
