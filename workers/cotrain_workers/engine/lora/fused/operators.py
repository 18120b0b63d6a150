"""Kernels as torch ops in `torch.ops.cotrain`, with their fake implementations for tensors without values.

The kernels access gradients and weights of adapters through the addresses in `entries`, which no schema shows. The
caller must therefore keep those tensors alive, and must not run under a compiler. If a call has fewer than a
kernel's three operands, the first one is repeated. `Tables` defines `tiles`, `entries`, `scales`, `owners`, `members`
and `spans`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from cotrain_workers.engine.lora.fused.tables import (
    MODULES,
    RANK,
    ROWS,
    SHRINK_ROWS,
    TOKENS,
    Tiles,
    expand_tiles,
    gradient_tiles,
    shrink_tiles,
)

BAND = 8  # tiles of rows that run together
SILU, GELU = 1, 2  # gates; GELU by tanh
CLAMPED = 3  # of experts only: the gate of gpt-oss

_LIBRARY = torch.library.Library("cotrain", "FRAGMENT")
_TABLES = "Tensor entries, Tensor scales"
SCHEMAS = {
    # low [T, columns] of xs, each [T, width]; `side` 0 multiplies with A, 1 with B
    "lora_shrink": "(Tensor[] xs, int modules, int side, Tensor tiles, Tensor entries, int columns) -> Tensor",
    # `gate`: 0, or SILU or GELU; then there are two modules
    "lora_expand": "(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? residual, int gate, Tensor low, "
    f"Tensor tiles, {_TABLES}) -> Tensor[]",
    "lora_expand_back": "(Tensor[] gys, Tensor[] weights, Tensor[] gated, int gate, Tensor low, Tensor tiles, "
    f"{_TABLES}) -> Tensor[]",
    "lora_add_gradient": "(Tensor low, Tensor[] xs, int modules, int side, Tensor owners, "
    f"Tensor members, Tensor spans, {_TABLES}) -> ()",
}


def missing_kernels(device: torch.device) -> str | None:
    """Return why no kernel can run on a device, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not programs_module().INTERPRETED:
        return "kernels run on CUDA, and on a CPU where TRITON_INTERPRET=1 is set"
    return None


def shrink(
    xs: Sequence[torch.Tensor], modules: int, side: int, tiles: torch.Tensor, entries: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return `[T, columns]`, the LoRA columns of modules next to each other. The modules may share one `x`."""
    low = _new_low(xs, modules, side, tiles, entries, columns)
    joint = len(xs) < modules
    widths = [x.shape[1] for x in xs]
    size = shrink_tiles(modules if joint else 1, max(widths), xs[0].element_size())
    # A module has at most `columns / modules` columns. Programs of columns beyond an adapter's rank return at once.
    each = columns if joint else -(-columns // modules)
    grid = (len(tiles) * ROWS // SHRINK_ROWS, -(-each // size.columns), 1 if joint else modules)
    programs_module().shrink[grid](
        *_three(xs), low, tiles, entries, entries.stride(0), *_three(widths), columns,
        MODULES=modules, JOINT=joint, SIDE=side, PARTS=ROWS // SHRINK_ROWS, BM=SHRINK_ROWS, **narrow_constants(size),
    )  # fmt: skip
    return low


def expand(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    gate: int,
    low: torch.Tensor,
    tiles: torch.Tensor,
    entries: torch.Tensor,
    scales: torch.Tensor,
) -> list[torch.Tensor]:
    """Return `x W^T + b + scale * low B^T` of each module, `[T, outputs]`. A single module adds `residual`.

    With a gate, return also the gated product of the two modules.
    """
    ys = _new_outputs(x, weights, biases, residual, gate)
    widths = [len(weight) for weight in weights]
    if tma := copies_by_tma([x, *weights]):
        programs_module().give_memory(x.device)
    size = expand_tiles(max(widths), x.element_size(), tma=tma, gated=gate != 0)
    count = sum(-(-width // size.columns) for width in (widths[:1] if gate else widths))
    programs_module().expand[(programs_of(len(tiles) * count, x.device),)](
        x, *_three(weights), *_three(biases or weights), x if residual is None else residual, low,
        *_three(ys), tiles, entries, entries.stride(0), scales, *x.shape, *_three(widths), low.shape[1],
        len(tiles), count,
        MODULES=len(weights), BIASED=bool(biases), PLUS=residual is not None, GATE=gate, TMA=tma,
        **product_constants(size),
    )  # fmt: skip
    return ys


def expand_back(
    gys: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    gated: Sequence[torch.Tensor],
    gate: int,
    low: torch.Tensor,
    tiles: torch.Tensor,
    entries: torch.Tensor,
    scales: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradient of the modules' common input, `[T, inputs]`. With a gate, return those of both `gated`."""
    gxs = _new_gradients(gys, weights, gated)
    inputs = weights[0].shape[1]
    if tma := copies_by_tma([*gys, *weights]):
        programs_module().give_memory(low.device)
    size = expand_tiles(inputs, gxs[0].element_size(), tma=tma, gated=gate != 0)
    count = -(-inputs // size.columns)
    gate_and_up = gated or [low, low]
    programs_module().expand_back[(programs_of(len(tiles) * count, low.device),)](
        *_three(gys), *_three(weights), low, *gate_and_up, gxs[0], gxs[-1], tiles, entries, entries.stride(0),
        scales, len(low), inputs, *_three([len(weight) for weight in weights]), low.shape[1], len(tiles), count,
        MODULES=len(weights), GATE=gate, TMA=tma, **product_constants(size),
    )  # fmt: skip
    return gxs


def add_gradient(
    low: torch.Tensor,
    xs: Sequence[torch.Tensor],
    modules: int,
    side: int,
    owners: torch.Tensor,
    members: torch.Tensor,
    spans: torch.Tensor,
    entries: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Add `scale * low^T x` of every segment to the gradient of its adapter, at its address in `entries`."""
    joint = len(xs) < modules
    widths = [x.shape[1] for x in xs]
    size = gradient_tiles(modules if joint else 1, max(widths), xs[0].element_size())
    each = low.shape[1] if joint else -(-low.shape[1] // modules)
    blocks = -(-each // size.columns)
    grid = (len(owners) - 1, -(-max(widths) // size.depth), blocks * (1 if joint else modules))
    programs_module().add_gradient[grid](
        low, *_three(xs), owners, members, spans, entries, entries.stride(0), scales,
        *_three(widths), low.shape[1],
        MODULES=modules, JOINT=joint, SIDE=side, BT=TOKENS, **narrow_constants(size),
    )  # fmt: skip


def product_constants(size: Tiles) -> dict[str, Any]:
    """Return the constants of a kernel for products with the base model's weights."""
    tile = {"BM": ROWS, "BN": size.columns, "BK": size.depth, "BR": RANK, "BAND": BAND}
    return {"WIDE": programs_module().INTERPRETED, **tile, "num_warps": size.warps, "num_stages": size.stages}


def narrow_constants(size: Tiles) -> dict[str, Any]:
    """Return the constants of a kernel for products with LoRA matrices, or for their gradients."""
    tile = {"BC": size.columns, "BK": size.depth}
    return {"WIDE": programs_module().INTERPRETED, **tile, "num_warps": size.warps, "num_stages": size.stages}


def copies_by_tma(operands: Sequence[torch.Tensor]) -> bool:
    """Return True if the device has a tensor memory accelerator and it can copy tiles of all `operands`.

    Values must have 16 bits, and each row must begin at a multiple of 16 bytes.
    """
    if not _has_tma(operands[0].device):
        return False
    return all(each.element_size() == 2 and each.shape[1] % 8 == 0 and each.data_ptr() % 16 == 0 for each in operands)


@cache
def _has_tma(device: torch.device) -> bool:
    """Return True on Hopper and on Blackwell's data centre GPUs, which also have the shared memory for its tiles."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def programs_of(tiles: int, device: torch.device) -> int:
    """Return the number of programs that share `tiles`: one for each multiprocessor of the device, at most."""
    return min(tiles, _multiprocessors(device)) if device.type == "cuda" else tiles


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _three(given: Sequence[Any]) -> list[Any]:
    return [*given, *[given[0]] * (MODULES - len(given))]


def programs_module() -> Any:
    """Return the module of the kernels, which imports Triton."""
    from cotrain_workers.engine.lora.fused import programs

    return programs


def _new_low(
    xs: Sequence[torch.Tensor], modules: int, side: int, tiles: Any, entries: Any, columns: int
) -> torch.Tensor:
    return xs[0].new_empty(len(xs[0]), columns)


def _new_outputs(
    x: torch.Tensor, weights: Sequence[torch.Tensor], _biases: Any, _residual: Any, gate: int, *_: Any
) -> list[torch.Tensor]:
    ys = [x.new_empty(len(x), len(weight)) for weight in weights]
    return [*ys, torch.empty_like(ys[0])] if gate else ys


def _new_gradients(
    gys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], gated: Sequence[torch.Tensor], *_: Any
) -> list[torch.Tensor]:
    shape = len(gys[0]), weights[0].shape[1]
    return [gys[0].new_empty(shape) for _ in range(len(gated) or 1)]


def no_result(*_: Any) -> None:
    """Do nothing: the fake implementation of an op that only writes to its arguments."""


def register(
    schemas: Mapping[str, str], real: Sequence[Callable[..., Any]], fake: Sequence[Callable[..., Any]]
) -> None:
    """Make ops of functions, in the order of their schemas by name, with their fake implementations."""
    for (name, schema), run, shape in zip(schemas.items(), real, fake, strict=True):
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cotrain::{name}", shape, lib=_LIBRARY)


register(SCHEMAS, (shrink, expand, expand_back, add_gradient), (_new_low, _new_outputs, _new_gradients, no_result))
