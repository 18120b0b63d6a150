"""Adapters of experts with the names and shapes of Tinker, which `tinker_cookbook.weights` reads.

PEFT stacks the matrices of all experts of a layer: A is `[experts * rank, inputs]`, expert slowest, and B
`[outputs, rank * experts]`, expert fastest. Gate and up are one matrix pair of twice the rank. At Tinker each product
has three-dimensional matrices, with a first dimension of 1 where the experts share one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

#: Names of products at Tinker.
_GATE, _UP, _DOWN = "w1", "w3", "w2"
_PLAIN, _INNER = ".experts", ".experts.base_layer"
_ENDS = (".lora_A.weight", ".lora_B.weight")


def at_tinker(tensors: Mapping[str, Any], rank: int, *, interleaved: bool) -> dict[str, Any]:
    """Return the tensors of an adapter file with the names and shapes of Tinker.

    `interleaved`: the rows of gate and up alternate in the model's weight.
    """
    found = {name: each for name, each in tensors.items() if not _is_of_experts(name)}
    for module in {name.removesuffix(_ENDS[0]) for name in tensors if _is_of_experts(name)}:
        if module.endswith(_ENDS[1]):
            continue
        a, b = (tensors[f"{module}{end}"] for end in _ENDS)
        for product, pair in _products(module, a, b, rank, interleaved=interleaved):
            name = f"{module.removesuffix('.base_layer')}.{product}"
            for end, matrices in zip(_ENDS, pair, strict=True):
                is_shared = bool((matrices == matrices[:1]).all())
                found[f"{name}{end}"] = matrices[:1] if is_shared else matrices
    return found


def _products(module: str, a: Any, b: Any, rank: int, *, interleaved: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each product with A `[experts, rank, inputs]` and B `[experts, outputs, rank]`."""
    is_down = not module.endswith(_INNER)
    width = rank if is_down else 2 * rank
    a = a.reshape(-1, width, a.shape[1])
    b = b.reshape(len(b), width, -1).permute(2, 0, 1)
    if is_down:
        yield _DOWN, (a, b)
        return
    half = b.shape[1] // 2
    rows = (slice(half), slice(half, None))
    if interleaved:
        rows = slice(0, None, 2), slice(1, None, 2)
    yield _GATE, (a[:, :rank], b[:, rows[0], :rank])
    yield _UP, (a[:, rank:], b[:, rows[1], rank:])


def _is_of_experts(name: str) -> bool:
    return name.rsplit(".lora_", 1)[0].endswith((_PLAIN, _INNER))
