"""Ops of a cycle and their outputs, as plain data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch

from cotrain_workers.engine.spec import AdapterSpec

#: Run and seq of an op.
OpId: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class BaseOp:
    """Op of a run. The ops of a run have ascending `seq`."""

    run: str
    seq: int

    @property
    def id(self) -> OpId:
        """Run and seq, under which its output is found."""
        return self.run, self.seq


@dataclass(frozen=True)
class Image:
    """Picture in a sequence, with one token for each cell of a grid, row by row."""

    start: int  # position of its first token
    height: int  # rows of the grid
    width: int
    data: bytes  # PNG or JPEG

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.height * self.width

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 digest of the data."""
        return hashlib.sha256(self.data).digest()


@dataclass(frozen=True)
class Datum:
    """One example: `n` tokens and the inputs of the loss.

    `inputs["target_tokens"]` is int64 `[n]` or `[n, K]`; every other input is float32 of that
    shape. Token ids within an image mean nothing.
    """

    tokens: np.ndarray  # int64 [n]
    inputs: Mapping[str, np.ndarray]
    routed_experts: np.ndarray | None = None
    """Experts of each token, integers `[n, layers with experts, k]`; -1 and None: the router chooses."""
    images: Sequence[Image] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its result: one value per target."""
        return self.inputs["target_tokens"].shape


@dataclass(frozen=True)
class KlDatum:
    """One example of a reverse KL: a continuation of `n` tokens after two contexts.

    Both sequences are a context and the continuation without its last token, which is only
    predicted. Target `i` is predicted at row `-n + i` of each.
    """

    tokens: np.ndarray  # int64: tokens of the run
    reference: np.ndarray  # int64: tokens of the reference
    weights: np.ndarray  # float32 [n], n >= 1
    routed_experts: np.ndarray | None = None  # experts of the run's tokens, as in `Datum`; the reference has its own

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its result: one value per target."""
        return self.weights.shape


@dataclass(frozen=True)
class Create(BaseOp):
    """Start of a run with a fresh adapter."""

    spec: AdapterSpec


@dataclass(frozen=True)
class GraphNode:
    """One step of a custom loss, as `torch.fx` records it; arguments are encoded as JSON."""

    op: str
    name: str
    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class LossGraph:
    """A custom loss of one datum: its arguments, log-probabilities first, and its nodes in order."""

    id: str  # identifies all of it
    inputs: Sequence[tuple[str, int]] = field(compare=False)  # name and number of axes, 0 to 2
    nodes: Sequence[GraphNode] = field(compare=False)
    metrics: Mapping[str, str] = field(compare=False)  # name to node


@dataclass(frozen=True)
class Pass(BaseOp):
    """Evaluation of a loss on datums; with `needs_grad`, its gradient is added to the run's, never averaged."""

    datums: Sequence[Datum]
    loss_fn: str
    loss_config: Mapping[str, float]
    needs_grad: bool
    slice_tokens: int | None = None
    """Maximum tokens of a slice, where memory does not allow larger ones: its sums then have other last bits.
    None: no limit.
    """
    graph: LossGraph | None = None  # of loss `custom`
    tenant: str = ""  # tenant that may share computed images with this pass; empty: no other run
    step: int | None = None  # optimizer steps of the run before it, if its datums have a `policy_step`


@dataclass(frozen=True)
class ReverseKl(BaseOp):
    """Sum of `weight * KL(run || reference)` over whole distributions; its gradient is added to the run's.

    Both are softmaxes of logits / `temperature`. The reference is never differentiated.
    """

    datums: Sequence[KlDatum]
    reference: HostWeights | None  # None: the base model alone
    temperature: float
    slice_tokens: int | None = None  # see `Pass.slice_tokens`
    needs_grad: ClassVar[bool] = True


@dataclass(frozen=True)
class OptimStep(BaseOp):
    """Optimizer step with the run's summed gradient, which is then zeroed. A `grad_clip_norm` of 0 is no limit."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    type: str = "adamw"  # or "muon", whose momentum is `beta1`


@dataclass(frozen=True)
class Save(BaseOp):
    """Copy of a run's weights to the host, after its ops so far; with `optimizer`, of its AdamW state, too."""

    optimizer: bool = False


@dataclass(frozen=True)
class HostOptimizer:
    """The AdamW state of an adapter on the host, in the arena layout of `spec`."""

    spec: AdapterSpec
    m: torch.Tensor  # fp32 [layout.size]
    v: torch.Tensor  # fp32 [layout.size]
    step: int  # optimizer steps taken


@dataclass(frozen=True)
class Load(BaseOp):
    """Replacement of the run's weights by `weights`. A pending gradient is dropped; AdamW continues or starts anew.

    With `creates`, the run starts with them and takes its spec from them.
    """

    path: str  # the tenant's name of the checkpoint; for messages
    weights: HostWeights
    optimizer: HostOptimizer | None  # None: zero moments, step 0
    creates: bool = False
    optimizer_type: str = "adamw"  # of the run that it creates


@dataclass(frozen=True)
class PeftModule:
    """The LoRA matrices of one module of a `PeftAdapter`: `W + scale * B @ A`."""

    name: str  # its path in the Hugging Face model
    a: str  # name of the tensor [rank, inputs]; `rank` is at most that of the run
    b: str  # name of the tensor [outputs, rank]
    scale: float
    in_halves: bool = False  # half of the ranks is of the experts' gate, the other of their up


@dataclass(frozen=True)
class PeftAdapter:
    """Adapter that PEFT wrote, and the spec that it gets."""

    spec: AdapterSpec
    modules: Sequence[PeftModule]
    tensors: bytes  # a safetensors file of those tensors, perhaps of the base model's embeddings, and of nothing else


@dataclass(frozen=True)
class Import(BaseOp):
    """Start of a run with an adapter that was made elsewhere."""

    adapter: PeftAdapter


Op = Create | Import | Pass | ReverseKl | OptimStep | Save | Load
Beginning = Create | Import | Load


def begins_run(op: Op) -> TypeGuard[Beginning]:
    """Return True if an op creates its run."""
    return isinstance(op, Create | Import) or (isinstance(op, Load) and op.creates)


@dataclass(frozen=True)
class CreateOutput:
    """Result of creating a run."""

    trainable_parameters: int


@dataclass(frozen=True)
class PassOutput:
    """Result of a pass: log-probabilities of the targets, one float32 array per datum, in order."""

    logprobs: Sequence[np.ndarray]  # each of the shape of its datum's target_tokens
    loss_sum: float
    drift: Mapping[str, float] = field(default_factory=dict)  # metrics of a policy or custom loss
    shared_tokens: int = 0  # not computed, because an earlier datum has the same prompt


@dataclass(frozen=True)
class ReverseKlOutput:
    """Result of a reverse KL. A target of weight 0 counts nowhere."""

    losses: Sequence[np.ndarray]  # per datum float32 [n]: weight * divergence of each target
    loss_sum: float
    kl_sum: float  # of the divergences themselves
    weighted_tokens: int


@dataclass(frozen=True)
class StepOutput:
    """Result of an optimizer step."""

    grad_norm: float  # global L2 norm over the run's gradient, before clipping


@dataclass(frozen=True)
class SaveOutput:
    """Copy of the weights; later ops of the run do not change it."""

    weights: HostWeights
    optimizer: HostOptimizer | None = None  # if requested


@dataclass(frozen=True)
class LoadOutput:
    """Result of a load: the run's state was replaced by that of a checkpoint."""

    path: str


@dataclass(frozen=True)
class Failure:
    """Failure of an op that changed nothing. `message` may be shown to the tenant."""

    message: str
    category: Literal["user", "server"]
    code: Literal["not_finite", "too_large"] | None = None  # for internal handling; not sent to clients


@dataclass(frozen=True)
class NoteOutput:
    """Result of an op that runs outside a cycle, such as a rewind, or that only changes records."""

    answer: Mapping[str, int] = field(default_factory=dict)  # fields of its result


Output = CreateOutput | PassOutput | ReverseKlOutput | StepOutput | SaveOutput | LoadOutput | NoteOutput | Failure


@dataclass(frozen=True)
class PassProgress:
    """Progress of a pass that takes several cycles, in tokens that the base model read for it."""

    now: int  # in this cycle
    in_all: int


class UpcomingBatch(NamedTuple):
    """The size of a micro-batch that runs next."""

    largest: OpId  # the op with most of its tokens, by (run, seq)
    tokens: int
    longest: int  # tokens of its longest datum
    needs_grad: bool


@dataclass(frozen=True)
class CyclePart:
    """A part of a cycle, in s of the wall clock. Other work may have run at its yield points."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True)
class CycleOutput:
    """Outputs and cost of one cycle."""

    outputs: Mapping[OpId, Output]
    """By (run, seq): one for every op of the cycle, except open passes and the ops deferred behind them."""
    forwards: int  # passes of the base model
    tokens: int
    padded_tokens: int  # tokens plus the filler of every micro-batch
    wave_s: float  # forward/backward, without the time at its yield points
    optim_s: float
    is_exact: bool = True  # False: memory ran out, and an op has other last bits than with more memory
    divided: Mapping[OpId, PassProgress] = field(default_factory=dict)
    """Progress of passes that stay open, or were open in an earlier cycle. Those without an output are open."""
    parts: Sequence[CyclePart] = ()  # waves and optimizer steps, in order

    @cached_property
    def open_tokens(self) -> dict[OpId, int]:
        """Open passes, each with the number of its tokens that have run."""
        return {at: each.in_all for at, each in self.divided.items() if at not in self.outputs}


def unknown_run() -> Failure:
    """Return the failure of an op whose run has no adapter, because creating it failed."""
    return Failure("This run has no adapter: its creation failed. Create another run.", "user")


class WeightsMissing(KeyError):
    """Error: the weights of this key are no longer stored, or cannot be used."""

    def __init__(self, key: str, reason: str = "") -> None:
        super().__init__(key)
        self.reason = reason  # reason for the tenant; empty if unknown


@dataclass(frozen=True)
class HostWeights:
    """Sampler weights on the host, in the arena layout of `spec`."""

    spec: AdapterSpec
    flat: torch.Tensor  # fp32 [layout.size]

    @property
    def bytes(self) -> int:
        """Size of `flat`, which need not have arrived."""
        return self.flat.nbytes

    def on_device(self) -> torch.Tensor | None:
        """Return the same values on the device if an adapter still has them there; read-only."""
        return None
