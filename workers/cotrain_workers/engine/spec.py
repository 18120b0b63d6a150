"""Specification of an adapter: its parameters, target modules, and the layout of its arena."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

Family = Literal["attn", "mlp", "unembed"]

# Every matrix starts on a 64-byte line, so that a GEMM has the same alignment in every arena.
ALIGN = 16


@dataclass(frozen=True)
class AdapterSpec:
    """Parameters that a tenant chose when creating a run. Effective weight: `W + (alpha / rank) *
    B @ A`.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0

    @property
    def scale(self) -> float:
        """Factor on `B @ A`."""
        return self.alpha / self.rank

    def trains(self, family: Family) -> bool:
        """Return whether modules of this family carry LoRA matrices."""
        chosen = {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}
        return chosen[family]


@dataclass(frozen=True)
class Target:
    """A linear module of the base model that LoRA can be attached to."""

    name: str  # its path in the Hugging Face model: "model.layers.0.self_attn.q_proj"
    family: Family
    inputs: int
    outputs: int


class _Pair(NamedTuple):
    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]


class Pair(_Pair):
    """The two LoRA matrices of one module."""

    @cached_property
    def at(self) -> torch.Tensor:
        """A^T: a view made once, not for every product."""
        return self.a.t()

    @cached_property
    def bt(self) -> torch.Tensor:
        """B^T, in the order of an arena."""
        return self.b.t()


class Sums(Pair):
    """A module's matrices in a gradient arena, to which products are added."""

    is_stale = False
    """True if the buffer is stale and counts as zero; the next product overwrites it."""


def kept_share(sums: Pair) -> int:
    """Return the factor of the sums in the next product: 0 if they are stale, else 1.

    The sums are then no longer stale, so call this right before A's and B's product.
    """
    if isinstance(sums, Sums) and sums.is_stale:
        sums.is_stale = False
        return 0
    return 1


@dataclass(frozen=True)
class Layout:
    """Positions of one adapter's matrices in a flat arena: A then B, in model order.

    B is stored transposed. A product with it then reads rows of `outputs` values instead of
    `rank` values. This is 2 to 7 times faster on CPU (rank 8, 256 tokens; the same bytes, other
    strides).
    """

    rank: int
    targets: tuple[Target, ...]
    offset_by_name: Mapping[str, tuple[int, int]]  # of A and of B
    size: int

    @property
    def trainable_parameters(self) -> int:
        """Number of trained values. `size` also counts the alignment gaps, which stay zero."""
        return sum(self.rank * (t.inputs + t.outputs) for t in self.targets)

    def views(self, arena: torch.Tensor) -> dict[str, Pair]:
        """Return every module's matrices as views into `arena` `[size]`."""
        rank, pairs = self.rank, {}
        for target in self.targets:
            at_a, at_b = self.offset_by_name[target.name]
            pairs[target.name] = Pair(
                arena[at_a : at_a + rank * target.inputs].view(rank, target.inputs),
                arena[at_b : at_b + rank * target.outputs].view(rank, target.outputs).t(),
            )
        return pairs


def plan_layout(spec: AdapterSpec, targets: Sequence[Target]) -> Layout:
    """Return the layout of the matrices that `spec` trains."""
    chosen = tuple(target for target in targets if spec.trains(target.family))
    return Layout(spec.rank, chosen, *lay_out_matrices(spec.rank, chosen))


def lay_out_matrices(
    rank: int, targets: tuple[Target, ...]
) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the offsets of A and B of each module, and the size of the arena."""
    offsets, end = {}, 0
    for target in targets:
        at_b = aligned(end + rank * target.inputs)
        offsets[target.name] = (end, at_b)
        end = aligned(at_b + target.outputs * rank)
    return offsets, end


def lora_widths(targets: Sequence[Target]) -> dict[str, int]:
    """Return the number of values that each family trains for one unit of rank."""
    widths: dict[str, int] = {}
    for target in targets:
        widths[target.family] = widths.get(target.family, 0) + target.inputs + target.outputs
    return widths


def aligned(offset: int) -> int:
    """Round up to the next possible offset of a matrix."""
    return -(-offset // ALIGN) * ALIGN
