"""What an adapter is: its spec, the modules it targets, and where each matrix lies in its arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

Family = Literal["attn", "mlp", "unembed"]

# Every matrix starts on a 64-byte line, so that a GEMM meets the same alignment in every arena.
ALIGN = 16


@dataclass(frozen=True)
class AdapterSpec:
    """What a tenant chose when the run was created. Effective weight: `W + (alpha / rank) * B @ A`."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0

    @property
    def scale(self) -> float:
        """Return the factor on `B @ A`."""
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
        """Return A^T, a view made once and not for every product."""
        return self.a.t()

    @cached_property
    def bt(self) -> torch.Tensor:
        """Return B^T, in whose order it lies in an arena."""
        return self.b.t()


class Sums(Pair):
    """A module's matrices in a gradient arena, to which products are added."""

    is_stale = False
    """What lies there is of an earlier gradient and counts as zeros: the next product is written over it."""


def kept_share(sums: Pair) -> int:
    """Return by what sums are multiplied in the product that is added next: 0 if they are stale, else 1.

    They are not stale any more: ask right before A's and B's product.
    """
    if isinstance(sums, Sums) and sums.is_stale:
        sums.is_stale = False
        return 0
    return 1


@dataclass(frozen=True)
class Layout:
    """Where the matrices of one adapter lie in a flat arena: A then B, in model order.

    B lies there transposed: every product with it then reads rows of `outputs` values instead of rows of
    `rank`, which is 2 to 7 times faster on CPU (rank 8, 256 tokens; the same bytes, other strides).
    """

    rank: int
    targets: tuple[Target, ...]
    offset_by_name: Mapping[str, tuple[int, int]]  # of A and of B
    size: int

    @property
    def trainable_parameters(self) -> int:
        """Return the number of trained values; `size` also counts the alignment gaps, which stay zero."""
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
    """Lay out the matrices of the modules that `spec` trains."""
    chosen = tuple(target for target in targets if spec.trains(target.family))
    return Layout(spec.rank, chosen, *lay_out_matrices(spec.rank, chosen))


def lay_out_matrices(
    rank: int, targets: tuple[Target, ...]
) -> tuple[dict[str, tuple[int, int]], int]:
    """Return where A and B of each module begin, and the size of the arena."""
    offsets, end = {}, 0
    for target in targets:
        at_b = aligned(end + rank * target.inputs)
        offsets[target.name] = (end, at_b)
        end = aligned(at_b + target.outputs * rank)
    return offsets, end


def lora_widths(targets: Sequence[Target]) -> dict[str, int]:
    """Count the values that each family trains for one unit of rank."""
    widths: dict[str, int] = {}
    for target in targets:
        widths[target.family] = widths.get(target.family, 0) + target.inputs + target.outputs
    return widths


def aligned(offset: int) -> int:
    """Round up to the next place where a matrix may start."""
    return -(-offset // ALIGN) * ALIGN
