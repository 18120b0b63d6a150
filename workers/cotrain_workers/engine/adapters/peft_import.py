"""Turn an adapter that was made elsewhere into one of ours: the same function, in our layout and scale.

Every module gets the run's one rank, and `alpha` 32: B takes what its own scale differs by. Rows that a
smaller matrix lacks, and modules it leaves out, begin as those of a fresh adapter: A random, B zero. So
they add nothing now and can be trained later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from cotrain_workers.engine.adapters.bank import initial_weights
from cotrain_workers.engine.ops import HostWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_workers.engine.ops import PeftAdapter, PeftModule
    from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target

    LayoutOf = Callable[[AdapterSpec], Layout]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ImportRefused(Exception):
    """This adapter cannot be taken; the message is a sentence for its tenant."""


def read_import(adapter: PeftAdapter, layout_of: LayoutOf, max_rank: int) -> HostWeights:
    """Read the matrices of an adapter that PEFT wrote into an arena of ours.

    Raises:
        ImportRefused: it does not fit this base model, or holds what is not a number.
    """
    try:
        tensors = load(adapter.tensors)
    except SafetensorError as unreadable:
        raise ImportRefused("The uploaded adapter cannot be read.") from unreadable
    spec = adapter.spec
    if not 1 <= spec.rank <= max_rank:
        raise ImportRefused(
            f"The adapter has rank {spec.rank}; between 1 and {max_rank} is served."
        )
    layout = layout_of(spec)
    flat = initial_weights(spec, layout)
    pair_by_name, target_by_name = (
        layout.views(flat),
        {target.name: target for target in layout.targets},
    )
    for module in adapter.modules:
        target = target_by_name.get(module.name)
        if target is None:
            raise ImportRefused(f"{module.a}: the base model has no module {module.name} to adapt.")
        a, b = (_take(tensors, name) for name in (module.a, module.b))
        _check_shapes(module, a, b, target, spec.rank)
        _fill(pair_by_name[module.name], a, b, module, spec.scale)
    if tensors:
        raise ImportRefused(f"{min(tensors)}: not a LoRA matrix of a module that can be adapted.")
    return HostWeights(spec, flat)


def _take(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ImportRefused(f"{name} is missing.")
    if tensor.dtype not in _DTYPES:
        raise ImportRefused(f"{name} is {tensor.dtype}; F32, F16 and BF16 can be imported.")
    return tensor.float()


def _check_shapes(
    module: PeftModule, a: torch.Tensor, b: torch.Tensor, target: Target, max_rank: int
) -> None:
    rank = a.shape[0] if a.ndim == 2 else 0
    if not 1 <= rank <= max_rank:
        raise ImportRefused(f"{module.a} has shape {list(a.shape)}: no rank of 1 to {max_rank}.")
    for name, tensor, shape in (
        (module.a, a, [rank, target.inputs]),
        (module.b, b, [target.outputs, rank]),
    ):
        if list(tensor.shape) != shape:
            raise ImportRefused(
                f"{name} has shape {list(tensor.shape)}; this base model needs {shape}."
            )


def _fill(
    pair: Pair, a: torch.Tensor, b: torch.Tensor, module: PeftModule, run_scale: float
) -> None:
    """Write a module's matrices over the first `r` of the run's ranks.

    `pair.a` is `[rank, inputs]`, `pair.b` `[outputs, rank]`; `a` and `b` have `r <= rank`.
    """
    factor = module.scale / run_scale
    if factor != 1.0:  # of our own exports it is: they come back to the bit
        b = (b.double() * factor).float()
    for name, matrix in ((module.a, a), (module.b, b)):
        if not torch.isfinite(matrix).all():
            raise ImportRefused(f"{name} holds numbers that are not finite, or too large.")
    rank = a.shape[0]
    pair.a[:rank], pair.b[:, :rank] = a, b
