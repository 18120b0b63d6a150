"""Specification of an adapter: its parameters, target modules, and the layout of its arena."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

Family = Literal["attn", "mlp", "unembed"]

# Every matrix starts on a 64-byte line, so that a GEMM has the same alignment in every arena.
ALIGN = 16


@dataclass(frozen=True)
class AdapterSpec:
    """Parameters that a tenant chose when creating a run. Effective weight: `W + (alpha / rank) * B @ A`."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0
    per_expert: bool = field(default=False, repr=False)
    """True if each expert has both of its matrices; only uploads have it. Otherwise the matrix on the
    model's width is shared by all experts of a layer, as at Tinker.
    """

    optimizer: str = field(default="adamw", repr=False)  # optimizer of the run: adamw or muon

    @property
    def scale(self) -> float:
        """Factor on `B @ A`."""
        return self.alpha / self.rank

    def trains(self, family: Family) -> bool:
        """Return whether modules of this family carry LoRA matrices."""
        chosen = {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}
        return chosen[family]

    def stored(self) -> dict[str, Any]:
        """Return the fields for a file; those of an adapter without experts, with AdamW, are as in old files."""
        fields = asdict(self)
        if self.optimizer == "adamw":
            del fields["optimizer"]
        if not self.per_expert:
            del fields["per_expert"]
        return fields


@dataclass(frozen=True)
class Target:
    """A linear module of the base model that LoRA can be attached to, or one product of all experts of a layer."""

    name: str  # its path in the Hugging Face model: "model.layers.0.self_attn.q_proj"
    family: Family
    inputs: int
    outputs: int
    experts: int = 0  # 0: a linear module
    experts_a: int = 1  # number of A matrices: 1 if the experts share one, else `experts`
    experts_b: int = 1  # number of B matrices
    interleaved: bool = False  # True if the rows of gate and up alternate in the model's weight

    @property
    def width(self) -> int:
        """Number of trained values for one unit of rank."""
        return self.experts_a * self.inputs + self.experts_b * self.outputs


class _Pair(NamedTuple):
    a: torch.Tensor  # [rank, inputs]; of experts [1 or experts, rank, inputs]
    b: torch.Tensor  # [outputs, rank]; of experts [1 or experts, outputs, rank]


class Pair(_Pair):
    """The two LoRA matrices of one module, or all matrices of the experts of a layer."""

    @cached_property
    def at(self) -> torch.Tensor:
        """A^T: a view made once, not for every product."""
        return self.a.mT

    @cached_property
    def bt(self) -> torch.Tensor:
        """B^T, in the order of an arena."""
        return self.b.mT


class Sums(Pair):
    """A module's matrices in a gradient arena, to which products are added."""

    is_stale = False  # True if the buffer is stale and counts as zero; the next product overwrites it


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

    B is stored transposed. A product with it then reads rows of `outputs` values instead of `rank` values. This is 2 to
    7 times faster on CPU (rank 8, 256 tokens; the same bytes, other strides).
    """

    rank: int
    targets: tuple[Target, ...]
    offset_by_name: Mapping[str, tuple[int, int]]  # of A and of B
    size: int

    @property
    def trainable_parameters(self) -> int:
        """Number of trained values. `size` also counts the alignment gaps, which stay zero."""
        return sum(self.rank * target.width for target in self.targets)

    @cached_property
    def target_by_name(self) -> dict[str, Target]:
        """Targets by name."""
        return {target.name: target for target in self.targets}

    @cached_property
    def gate_by_experts(self) -> dict[str, Target]:
        """Target of the gate of each experts module, by the module's path."""
        gates = (each for each in self.targets if each.experts and each.name.endswith(".gate_proj"))
        return {gate.name.rpartition(".")[0]: gate for gate in gates}

    def views(self, arena: torch.Tensor) -> dict[str, Pair]:
        """Return every module's matrices as views into `arena` `[size]`."""
        rank, pairs = self.rank, {}
        for target in self.targets:
            at_a, at_b = self.offset_by_name[target.name]
            pairs[target.name] = Pair(
                matrices(arena, at_a, target.experts, target.experts_a, rank, target.inputs),
                matrices(arena, at_b, target.experts, target.experts_b, rank, target.outputs).mT,
            )
        return pairs


def matrices(arena: torch.Tensor, at: int, experts: int, count: int, rank: int, width: int) -> torch.Tensor:
    """Return a view of `count` matrices of experts `[count, rank, width]`, or, without experts, of one matrix."""
    shape = (count, rank, width) if experts else (rank, width)
    return arena[at : at + count * rank * width].view(shape)


def plan_layout(spec: AdapterSpec, targets: Sequence[Target]) -> Layout:
    """Return the layout of the matrices that `spec` trains."""
    known = own_matrices(targets) if spec.per_expert else targets
    chosen = tuple(target for target in known if spec.trains(target.family))
    return Layout(spec.rank, chosen, *lay_out_matrices(spec.rank, chosen))


def own_matrices(targets: Sequence[Target]) -> list[Target]:
    """Return the targets with both matrices for each expert."""
    return [
        replace(target, experts_a=target.experts, experts_b=target.experts) if target.experts else target
        for target in targets
    ]


def shape_of(spec: AdapterSpec) -> tuple[object, ...]:
    """Return a key that is equal for adapters whose matrices have the same positions and shapes."""
    return spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed, spec.per_expert


def lay_out_matrices(rank: int, targets: tuple[Target, ...]) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the offsets of A and B of each module, and the size of the arena."""
    offsets, end = {}, 0
    for target in targets:
        at_b = aligned(end + rank * target.experts_a * target.inputs)
        offsets[target.name] = (end, at_b)
        end = aligned(at_b + rank * target.experts_b * target.outputs)
    return offsets, end


def lora_widths(targets: Sequence[Target]) -> dict[str, int]:
    """Return the number of values that each family trains for one unit of rank.

    `experts` are those that an adapter with both matrices of each expert has in addition.
    """
    widths: dict[str, int] = {}
    for target in targets:
        widths[target.family] = widths.get(target.family, 0) + target.width
        if target.experts:
            more = target.experts * (target.inputs + target.outputs) - target.width
            widths["experts"] = widths.get("experts", 0) + more
    return widths


def has_experts(targets: Sequence[Target]) -> bool:
    """Return True if a base model is a mixture of experts."""
    return any(target.experts for target in targets)


def aligned(offset: int) -> int:
    """Round up to the next possible offset of a matrix."""
    return -(-offset // ALIGN) * ALIGN


def seed_of(name: str) -> int:
    """Return 63 bits derived from a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
