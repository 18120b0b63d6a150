"""Experts in an adapter: from PEFT's stacked matrices to those of each expert, or to Tinker's names.

PEFT stacks the matrices of all experts of a layer: A is `[experts * rank, inputs]`, expert slowest, and B
`[outputs, rank * experts]`, expert fastest. Gate and up are one matrix pair of twice the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Matrices = Mapping[str, tuple[Any, Any]]

NOTE, SHARED = "experts", "shared_outer"
_EXPERTS, _GATE_UP = ".experts", ".experts.base_layer"
#: Names of products at Tinker.
TINKER = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
#: Families whose files hold the experts of a layer as one tensor.
STACKED_IN_FILES = ("gpt_oss", "granitemoe")


def has_experts(matrices: Matrices) -> bool:
    """Return True if an adapter changes experts."""
    return any(name.endswith(_GATE_UP) for name in matrices)


def products(matrices: Matrices, rank: int, *, interleaved: bool) -> dict[str, tuple[Any, Any]]:
    """Return A `[experts, rank, inputs]` and B `[experts, outputs, rank]` of each product of experts.

    `interleaved`: the rows of gate and up alternate in the model's weight.
    """
    found = {}
    for name, (a, b) in matrices.items():
        if name.endswith(_GATE_UP):
            module = name.removesuffix(".base_layer")
            a, b = _unstacked(a, b, 2 * rank)
            half = b.shape[1] // 2
            rows = (
                [slice(0, None, 2), slice(1, None, 2)]
                if interleaved
                else [slice(half), slice(half, None)]
            )
            for product, own, ranks in zip(
                ("gate_proj", "up_proj"), rows, (slice(rank), slice(rank, None)), strict=True
            ):
                found[f"{module}.{product}"] = a[:, ranks], b[:, own, ranks]
        elif name.endswith(_EXPERTS):
            found[f"{name}.down_proj"] = _unstacked(a, b, rank)
    return found


def by_expert(matrices: Matrices, rank: int) -> dict[str, tuple[Any, Any]]:
    """Return the matrices with one module for each expert: `….experts.5.gate_proj`."""
    plain = {name: pair for name, pair in matrices.items() if _EXPERTS not in name}
    for name, (a, b) in products(matrices, rank, interleaved=False).items():
        module, _, product = name.rpartition(".")
        for number in range(len(a)):
            plain[f"{module}.{number}.{product}"] = a[number], b[number]
    return plain


def at_tinker(
    matrices: Matrices, rank: int, *, is_shared: bool, interleaved: bool
) -> dict[str, tuple[Any, Any]]:
    """Return the matrices with Tinker's names and shapes: three dimensions, the first of them 1 if experts share it."""
    plain = {name: pair for name, pair in matrices.items() if _EXPERTS not in name}
    for name, (a, b) in products(matrices, rank, interleaved=interleaved).items():
        module, _, product = name.rpartition(".")
        if is_shared:
            a, b = (a, b[:1]) if product == "down_proj" else (a[:1], b)
        plain[f"{module}.{TINKER[product]}"] = a, b
    return plain


def in_files(weight: str) -> str:
    """Return the name of a module in transformers for the name in a file of Mixtral's kind."""
    if ".block_sparse_moe.experts." not in weight:
        return weight
    stem, _, last = weight.replace(".block_sparse_moe.", ".mlp.").rpartition(".")
    names = {tinker: product for product, tinker in TINKER.items()}
    return f"{stem}.{names.get(last, last)}"


def _unstacked(a: Any, b: Any, rank: int) -> tuple[Any, Any]:
    return a.reshape(-1, rank, a.shape[1]), b.reshape(len(b), rank, -1).permute(2, 0, 1)
