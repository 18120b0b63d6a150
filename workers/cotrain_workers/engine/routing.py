"""Assignment of the rows of a packed micro-batch to adapters and sequences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.spec import Layout, Pair

# A row of a GEMM is the same, bit for bit, in every matrix of 32 rows or more (measured on CPU fp32). Below that, other
# kernels are used. Steps of 32 waste at most 6 % from 512 tokens on. Larger steps for larger rows keep the number of
# shapes low, because a GPU library may choose other kernels for each shape.
FINE_STEP, FINE_LIMIT, COARSE_STEP = 32, 2048, 128
#: Calls of attention that cost less than bringing the sequences of one length together.
FEW_CALLS = 32


def bucket(tokens: int) -> int:
    """Return the padded length for `tokens` rows."""
    return up_to(tokens, FINE_STEP if tokens <= FINE_LIMIT else COARSE_STEP)


def up_to(tokens: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-tokens // step) * step


class Prompt(NamedTuple):
    """Rows of an earlier sequence that another one attends to as its own first rows."""

    start: int  # first row of the earlier sequence
    length: int


class EqualLengths(NamedTuple):
    """Sequences of equal length; attention processes them in one call."""

    start: int  # first row of the first one in the packed row
    sequences: int
    length: int
    prompt: Prompt | None = None  # of all of them


class StatefulRows(Protocol):
    """Sequences of a packed row of `T` tokens, and their states."""

    def before(self, layer: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the rows one, two … tokens before each row of `x` `[T, channels]`; zero before a sequence."""

    def scan(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the outputs of the gated delta rule `[T, heads, d_v]`, fp32; see `model/linear_attention.py`."""


@dataclass
class SequenceTable:
    """Sequences of a packed row, filler included, and their attention masks. `lengths` adds up to the padded length."""

    lengths: Sequence[int]
    device: torch.device
    prompts: Mapping[int, Prompt] = field(default_factory=dict)
    """Shared prompts, by the index of the sequence that continues them."""
    equal_lengths: tuple[EqualLengths, ...] = field(init=False)
    """Neighbours of equal length; with `rows_by_length`, all sequences of a length."""
    rows_by_length: tuple[np.ndarray, np.ndarray] | None = field(init=False, default=None)
    """Rows in the order of `equal_lengths`, int64 `[T]`, and the way back; None if they are in that order."""
    longest: int = field(init=False)
    rows: dict[int, StatefulRows] = field(init=False, default_factory=dict)
    """Layout for layers with a state, by the length of their convolution."""
    _masks: dict[tuple[int, int | None, int], torch.Tensor] = field(init=False, default_factory=dict)
    _offsets: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.longest = max(self.lengths)
        starts = list(accumulate(self.lengths, initial=0))
        leads = {prompt.start for prompt in self.prompts.values()}

        def kind(at: int) -> tuple[int, Prompt | None, int]:
            # A sequence with a shared prompt is processed alone, so no neighbour of its length gets a sum of zeros.
            own = starts[at] if starts[at] in leads and self.lengths[at] else -1
            return self.lengths[at], self.prompts.get(at), own

        groups = [list(same) for _, same in groupby(range(len(self.lengths)), kind)]
        if len(groups) >= FEW_CALLS:
            groups = self._by_length(groups, kind, starts)
        self.equal_lengths = tuple(EqualLengths(starts[same[0]], len(same), *kind(same[0])[:2]) for same in groups)

    def _by_length(
        self, groups: list[list[int]], kind: Callable[[int], tuple[int, Prompt | None, int]], starts: Sequence[int]
    ) -> list[list[int]]:
        """Return all sequences of a length as one group, if that at least halves the number of groups.

        Very short sequences of two lengths in turn would otherwise need a call each. Groups that share prompts stay
        as they are, after the others: a gradient of a prompt is summed group by group.
        """
        by_length: dict[int, list[int]] = {}
        sharing = []
        for same in groups:
            length, prompt, own = kind(same[0])
            if prompt is None and own < 0:
                by_length.setdefault(length, []).extend(same)
            else:
                sharing.append(same)
        fewer = [*by_length.values(), *sharing]
        if 2 * len(fewer) > len(groups):
            return groups
        sequences = [at for same in fewer for at in same]
        lengths = np.array(self.lengths)[sequences]
        offset_by_sequence = np.array(starts)[sequences] - (np.cumsum(lengths) - lengths)
        rows = np.arange(lengths.sum()) + np.repeat(offset_by_sequence, lengths)
        self.rows_by_length = rows, np.argsort(rows)
        return fewer

    def offsets(self) -> torch.Tensor:
        """Return the start of each sequence, and the end: int32 `[sequences + 1]`."""
        if self._offsets is None:
            ends = list(accumulate(self.lengths, initial=0))
            self._offsets = to_device(np.array(ends, np.int32), self.device)
        return self._offsets

    def mask(self, length: int, window: int | None, prompt: int = 0) -> torch.Tensor:
        """Return bool `[length, prompt + length]`, true for visible positions: back, at most `window` tokens."""
        key = (length, window, prompt)
        if key not in self._masks:
            at = torch.arange(prompt + length, device=self.device)
            back = at[prompt:, None] - at[None, :]
            self._masks[key] = (back >= 0) & (back < (window or len(at)))
        return self._masks[key]


@dataclass(frozen=True)
class AttentionRule:
    """Attention parameters of one layer. `window` counts the token itself and those before it."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """Score of each head `[heads]` for attending to nothing (gpt-oss), or None."""

    @property
    def is_plain(self) -> bool:
        """True if scores are neither capped nor compared with a sink."""
        return self.softcap is None and self.sinks is None


class Part(NamedTuple):
    """One segment as seen by one module."""

    start: int
    stop: int
    weights: Pair
    scale: float
    grads: Pair | None  # destination of the weight gradients; None for a forward-only pass


class Source(Protocol):
    """Matrices of one adapter, trained or frozen."""

    @property
    def layout(self) -> Layout:
        """Positions of the matrices in `weights`."""

    @property
    def weights(self) -> torch.Tensor:
        """The arena, 1-D, of any floating type."""

    @property
    def compute(self) -> Mapping[str, Pair]:
        """Matrices by module, in the base model's type."""


@dataclass(frozen=True)
class Segment:
    """Rows `start` to `stop` of the packed row: one slice of one op, with one adapter."""

    start: int
    stop: int
    source: Source
    scale: float
    grads: Mapping[str, Pair] | None


class TrainingLora(Protocol):
    """The LoRA paths of one micro-batch; see `lora/`."""

    def linear(self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`, each row with its own adapter; add weight gradients in backward."""

    def parts(self, module: str) -> Sequence[Part]:
        """Return the segments whose adapter trains `module`, one by one."""


@dataclass(frozen=True)
class ImageRows:
    """Rows of a packed row that belong to images, and their features from the vision tower."""

    rows: torch.Tensor  # int64 [n]
    features: torch.Tensor
    """`[1 + L, n, d]`: input of the decoder, and additions to the outputs of its first `L` layers."""

    def fill(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[1, T, d]` with the features instead of the tokens' own."""
        return embeddings.index_copy(1, self.rows, self.features[:1])

    def add(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output `[1, T, d]` of a layer with the features of that layer added."""
        if layer + 1 >= len(self.features):
            return hidden
        return hidden.index_add(1, self.rows, self.features[layer + 1 : layer + 2])


@dataclass(frozen=True)
class RowChunks:
    """Division of the rows of MLPs, to save memory (`model/activation_checkpointing.py`)."""

    rows: int
    lora_of: Callable[[Sequence[Segment], int], TrainingLora]
    """Return the LoRA paths of some segments of a number of rows."""


@dataclass(frozen=True)
class Route:
    """The segments and sequences of one micro-batch, in the order of their rows."""

    segments: Sequence[Segment]
    sequences: SequenceTable
    lora: TrainingLora
    experts: torch.Tensor | None = None
    """Given experts of each token, integers `[layers with experts, T, k]`; None: routers choose all of them."""
    images: ImageRows | None = None
    chunks: RowChunks | None = None  # None: MLPs compute all rows at once


class Group(NamedTuple):
    """Adjacent rows of one expert, and within it of one adapter."""

    expert: int
    start: int
    stop: int


#: Rows of each adapter in the experts that its tokens have, by the first token of the adapter.
ExpertRows = Mapping[int, Sequence[Group]]


class ExpertWeights(NamedTuple):
    """Frozen weights of the experts of a layer, and the kernel's number of their gate."""

    gate_up: torch.Tensor  # [experts, 2 * inner, width], the rows of the gate first
    down: torch.Tensor  # [experts, width, inner]
    gate: int
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inner]
    down_bias: torch.Tensor | None = None  # [experts, width]

    @property
    def gate_and_up(self) -> list[torch.Tensor]:
        """Weights of gate and up, `[experts, inner, width]`."""
        return list(self.gate_up.chunk(2, dim=1))

    @property
    def gate_biases(self) -> list[torch.Tensor]:
        """Biases of gate and up, `[experts, inner]`; empty if there are none."""
        return [] if self.gate_up_bias is None else list(self.gate_up_bias.chunk(2, dim=1))

    @property
    def down_biases(self) -> list[torch.Tensor]:
        """Bias of down; empty if there is none."""
        return [] if self.down_bias is None else [self.down_bias]


class StepRoute(Protocol):
    """Route of a decoder step, in place of the training route; see `decoding/step.py`."""

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """Rows (start, stop) of each adapter."""

    @property
    def states(self) -> StatefulRows:
        """Sequences of the step, for layers with a state."""

    def add_to_experts(self, module: str, x: torch.Tensor, y: torch.Tensor, groups: ExpertRows) -> None:
        """Add the LoRA path of rows of experts `x` `[P, in]` to `y` `[P, out]`, in place."""

    def experts(
        self, name: str, own: ExpertWeights, x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the weighted sums of each token's experts `index` `[T, k]`; None if no kernel computes them."""

    def end(self) -> None:
        """Complete the results after the last layer."""

    def linear(self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`, each row with its own adapter."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape, each row within its own sequence."""


class LinearWeights(Protocol):
    """Frozen linear module of the base model. Its tensors may change from one micro-batch to the next."""

    @property
    def weight(self) -> Any:
        """The weight, `[out, in]`: a tensor, or a `QuantizedWeight`."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, `[out]`, or None."""


class Router:
    """Holder of the route of the running micro-batch or decoder step, for the modules of one base model."""

    def __init__(self) -> None:
        self.linears: dict[str, LinearWeights] = {}  # by name
        self.unfused_experts = ""  # reason why no kernel computes the experts, if there is one
        self.expert_gate = 0  # number of the kernel of their gate
        self.step: StepRoute | None = None  # set while a decoder step runs
        self.step_images: ImageRows | None = None  # of that step
        self._route: Route | None = None

    @property
    def route(self) -> Route:
        """The current route. The model cannot run without one, because it would mix sequences."""
        if self._route is None:
            raise RuntimeError("The base model was called outside a micro-batch: no segment table.")
        return self._route

    @contextmanager
    def use(self, route: Route) -> Iterator[None]:
        """Set the route for one micro-batch; keep it until backward has finished."""
        before, self._route = self._route, route
        try:
            yield
        finally:
            self._route = before

    @property
    def images(self) -> ImageRows | None:
        """Images of the current micro-batch or decoder step."""
        return self.step_images if self._route is None else self._route.images

    @contextmanager
    def use_step(self, step: StepRoute, images: ImageRows | None = None) -> Iterator[None]:
        """Set the route for one decoder step; never inside a micro-batch."""
        assert self._route is None
        self.step, self.step_images = step, images
        try:
            yield
        finally:
            self.step = self.step_images = None
