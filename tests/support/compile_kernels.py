"""Compilation of the engine's own kernels for GPUs that are not present, with a report of their
resources.

    python -m tests.support.compile_kernels 90              # the capability: a large model in bf16
    python -m tests.support.compile_kernels 90 fp32 64      # products of training alone: type and width

Triton's compiler needs no device. Each line is JSON: kernel, modules (or the shape of an attention), bytes of
shared memory; for kernels of decoding also registers and the bytes that a thread spills.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from typing import Any

from cotrain_workers.engine.decoding import lora_kernel, page_kernel
from cotrain_workers.engine.lora.fused import step_expert_operators
from cotrain_workers.engine.lora.fused.operators import BAND, CLAMPED, GELU, SILU
from cotrain_workers.engine.lora.fused.step_expert_operators import PROMPT_ROWS, ROW_ROWS, RUN, row_tiles
from cotrain_workers.engine.lora.fused.tables import (
    EXPERT_PARTS,
    RANK,
    ROWS,
    SHRINK_ROWS,
    SUM_COLUMNS,
    TOKENS,
    Tiles,
    expand_tiles,
    expert_tiles,
    gradient_tiles,
    shrink_tiles,
)
from cotrain_workers.engine.model import layer_kernels
from cotrain_workers.engine.model.layer_kernels import COLUMNS, WARPS

WIDTH = 4096
TYPES = {
    **dict.fromkeys(["tiles", "owners", "members", "spans", "bounds"], "*i32"),
    **{"positions": "*i64", "shares": "*fp32"},
    **dict.fromkeys(["pitch", "experts", "segments", "chosen", "bias_pitch"], "i32"),
    **{"entries": "*i64", "scales": "*fp32"},
    **dict.fromkeys(["stride", "height", "inputs", "columns", "width0", "width1", "width2"], "i32"),
    **dict.fromkeys(["tile_count", "block_count", "width", "heads", "half"], "i32"),
    **dict.fromkeys(["logits", "norms", "logprobs", "slopes"], "*fp32"),
    **{"targets": "*i64", "first": "i32", "count": "i32", "cap": "fp32", "eps": "fp32"},
    **dict.fromkeys(["partial", "sums"], "*fp32"),
    **{"table": "*i64", "largest": "i32", **dict.fromkeys(["at0", "at1", "at2"], "i32")},
    **{"lengths": "*i32", "pages": "*i32", "scale": "fp32"},
    **dict.fromkeys(["index"], "*i64"),
    **dict.fromkeys(["kinds", "slots", "rows"], "*i32"),
    **dict.fromkeys(["tokens", "groups", "b_width", "unit", "unit0", "unit1", "unit2", "unit3"], "i32"),
    **dict.fromkeys(["row_stride", "head_stride", "page_count", "capacity", "window"], "i32"),
}
#: Query heads, key-value heads and head size: Qwen3-8B, Gemma 2 2B, Phi-3 and a small model.
HEADS = ((32, 8, 128), (8, 4, 256), (32, 32, 96), (28, 4, 64))
#: Arguments that need not be multiples of 16.
ODD = (
    *("height", "stride", "tile_count", "block_count", "eps", "heads", "first", "count", "cap", "scale"),
    *("spans", "lengths", "pages", "page_count", "capacity", "window"),
    *("experts", "segments", "chosen", "bounds", "largest", "tokens", "groups", "index", "kinds"),
)


def products(
    modules: int, item: int, *, width: int = WIDTH, tma: bool = False
) -> Iterator[tuple[str, dict[str, Any], Tiles]]:
    """Yield each product of training by name, with its compile-time constants."""
    common: dict[str, Any] = {"MODULES": modules, "WIDE": False}
    for gate in (0, SILU, GELU):
        wide = expand_tiles(width, item, tma=tma, gated=gate != 0)
        tile = {**common, "BM": ROWS, "BN": wide.columns, "BK": wide.depth, "BR": RANK}
        tile |= {"BAND": BAND, "GATE": gate, "TMA": tma}
        if gate == 0 or modules == 1:
            yield "expand_back", tile, wide
        if gate == 0 or modules > 1:
            pair = {"MODULES": 2} if gate else {}
            yield "expand", {**tile, **pair, "PLUS": modules == 1, "BIASED": gate == 0}, wide
    for joint in (False, True):
        side_by_side = modules if joint else 1
        low, gradient = (tiles(side_by_side, width, item) for tiles in (shrink_tiles, gradient_tiles))
        narrow = {**common, "JOINT": joint, "SIDE": int(not joint), "BC": low.columns}
        rows = {"PARTS": ROWS // SHRINK_ROWS, "BM": SHRINK_ROWS}
        yield "shrink", {**narrow, **rows, "BK": low.depth}, low
        yield "add_gradient", {**narrow, "BT": TOKENS, "BK": gradient.depth}, gradient


def layers(modules: int) -> Iterator[tuple[str, dict[str, Any], Tiles]]:
    """Yield the other kernels of training, with their compile-time constants."""
    one_row = Tiles(WIDTH, depth=1, warps=WARPS, stages=1)
    for way in ("", "_backward"):
        plus = {"PLUS": modules == 1} if way else {}
        yield f"norm{way}", {"ONE": modules == 1, **plus, "BLOCK": WIDTH}, one_row
        for normed in (True, False):
            flags = {"NORM": normed, "ONE": modules == 1}
            yield f"rotated{way}", {**flags, "HEADS": 32, "HALF": 64}, one_row
    values = Tiles(layer_kernels.GATE_BLOCK, depth=1, warps=layer_kernels.GATE_WARPS, stages=1)
    yield "gated", {"GELU": modules == 1, "BLOCK": layer_kernels.GATE_BLOCK}, values
    columns = Tiles(COLUMNS, depth=1, warps=WARPS, stages=1)
    for name, size in (("norms", COLUMNS), ("pick", 4), ("backward", COLUMNS)):
        yield f"softmax_{name}", {"CAPPED": modules == 1, "BLOCK": size}, columns


def of_experts(item: int, *, width: int = WIDTH, tma: bool = False) -> Iterator[tuple[str, dict[str, Any], Tiles]]:
    """Yield the kernels of a mixture of experts, with their compile-time constants."""
    plain: dict[str, Any] = {"WIDE": False}
    yield "find_tiles", {"EXPERTS": 128, "SEGMENTS": 128, "BM": ROWS}, Tiles(1, 1, 4, 1)
    size = expert_tiles(width, item, tma=tma)
    tile = {**plain, "BM": ROWS, "BN": size.columns, "BK": size.depth, "BR": RANK, "BAND": BAND}
    for gate in (0, SILU, GELU, CLAMPED):
        yield "expert_expand", {**tile, "GATE": gate, "TMA": tma, "BIASED": gate == CLAMPED}, size
        modules = 1 if gate else 2
        yield "expert_expand_back", {**tile, "GATE": gate, "TMA": tma, "MODULES": modules}, size
    low, gradient = (each(1, width, item) for each in (shrink_tiles, gradient_tiles))
    for modules in (1, 2):
        narrow = {**plain, "MODULES": modules, "SIDE": modules - 1, "BC": low.columns}
        rows = {"PARTS": EXPERT_PARTS, "BM": SHRINK_ROWS}
        yield "expert_shrink", {**narrow, **rows, "BK": low.depth}, low
        tile = {"SHARED": modules == 1, "BK": gradient.depth, "BT": TOKENS}
        yield "expert_gradient", {**narrow, **tile}, gradient
    for shared in (False, True):
        yield "expert_sum", {"SHARED": shared, "BN": SUM_COLUMNS}, Tiles(1, 1, 4, 1)


def of_steps(item: int) -> Iterator[tuple[str, dict[str, Any], Tiles]]:
    """Yield the kernels of the experts of a decoder step, with their compile-time constants."""
    plain: dict[str, Any] = {"WIDE": False}
    ordered = {"BM": step_expert_operators.SORTED, "BN": step_expert_operators.COMPARED}
    yield "order_rows", {"KINDS": True, **ordered}, Tiles(1, 1, 4, 1)
    low = shrink_tiles(1, WIDTH, item)
    for by_row, modules in ((False, 2), (True, 2), (True, 1)):
        yield (
            "step_shrink",
            {**plain, "BY_ROW": by_row, "MODULES": modules, "BM": RUN, "BC": low.columns, "BK": low.depth},
            low,
        )
    for height in (ROW_ROWS, PROMPT_ROWS):
        for gate in (0, SILU, GELU, CLAMPED):
            size = row_tiles(height, item, gated=gate != 0)
            tile = {"BM": height, "BN": size.columns, "BK": size.depth, "BR": RANK}
            yield "step_expand", {**plain, **tile, "GATE": gate, "PLUS": True, "BIASED": gate == CLAMPED}, size
    combined = {"BN": step_expert_operators.COMBINED, "BR": RANK}
    yield "step_combine", combined, Tiles(1, 1, 4, 1)


def attentions(dtype: str) -> Iterator[tuple[str, dict[str, Any], Tiles]]:
    """Yield the kernels over pages, with their compile-time constants."""
    for heads, kv_heads, width in HEADS:
        group, item = heads // kv_heads, 4 if dtype == "fp32" else 2
        for is_prompt in (False, True):
            size = page_kernel.sizes(group, width, 256, item, is_prompt=is_prompt)
            fixed = {"N": size.keys, "BLOCK": size.columns, "SPLIT": size.split, "MOST": size.most}
            fixed["WIDTH"] = width
            own = {"HEADS": kv_heads, "GROUP": group, "PAGE": 256, "M": size.rows, "WIDE": False}
            tiles = Tiles(size.keys, depth=1, warps=page_kernel.WARPS, stages=page_kernel.STAGES)
            yield "attend", {**fixed, **own, "CAPPED": True}, tiles
            if not is_prompt:
                yield "combine", {**fixed, "HEADS": heads}, tiles


def loras(dtype: str) -> Iterator[tuple[str, dict[str, Any], Tiles]]:
    """Yield the kernels of LoRA in decoding, with their compile-time constants."""
    for modules in (1, 2, 3):
        fixed = {"MODULES": modules, "SPLITS": lora_kernel.SPLITS, "WIDE": False}
        fixed |= {"M": lora_kernel.ROWS, "R": lora_kernel.RANKS}
        low = lora_kernel.shrink_tiles(4 if dtype == "fp32" else 2)
        yield "shrink_rows", {**fixed, "BK": low.depth}, low
        for width in (WIDTH, 64):
            size = lora_kernel.expand_tiles([width])
            yield "expand_rows", {**fixed, "BN": size.columns}, size


def resources(kernel: Any) -> dict[str, int]:
    """Return the registers of a compiled kernel and the bytes that a thread spills, as ptxas reports them."""
    from triton import knobs

    ptx = kernel.asm["ptx"]
    (arch,) = re.findall(r"\.target (\w+)", ptx)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
    found = {"registers": r"(\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    return {name: int(re.findall(pattern, told)[0]) for name, pattern in found.items()}


def compiled(name: str, dtype: str, constants: dict[str, Any], tiles: Tiles, arch: int) -> Any:
    """Compile one kernel for pointers and widths that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget

    from cotrain_workers.engine.decoding import lora_programs, page_programs
    from cotrain_workers.engine.lora.fused import expert_programs, programs, step_expert_programs
    from cotrain_workers.engine.model import layer_programs

    modules = (programs, expert_programs, step_expert_programs, layer_programs, page_programs, lora_programs)
    kernel = next(getattr(each, name) for each in modules if hasattr(each, name))
    names = list(kernel.arg_names)
    types = {**TYPES, "positions": "*i32"} if kernel.__module__ == step_expert_programs.__name__ else TYPES
    signature = {each: "constexpr" if each in constants else types.get(each, f"*{dtype}") for each in names}
    divisible = {
        (at,): [["tt.divisibility", 16]] for at, each in enumerate(names) if each not in constants and each not in ODD
    }
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(each),): value for each, value in constants.items()},
        attrs=divisible,
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def report_decoding(arch: int) -> None:
    """Print a line for each kernel of decoding, except those of experts."""
    for dtype in ("bf16", "fp32"):
        for kernel, given, sizes in attentions(dtype):
            found = compiled(kernel, dtype, given, sizes, arch)
            shape = f"{dtype} {given['WIDTH']} {given.get('M', '')}"
            row = {"kernel": kernel, "modules": shape, "shared": found.metadata.shared}
            print(json.dumps(row | resources(found)))
        for kernel, given, sizes in loras(dtype):
            found = compiled(kernel, dtype, given, sizes, arch)
            shape = f"{dtype} {given['MODULES']} {given.get('BN', '')}"
            row = {"kernel": kernel, "modules": shape, "shared": found.metadata.shared}
            print(json.dumps(row | loads(found) | resources(found)))


def report_training(arch: int, dtype: str, width: int) -> None:
    """Print a line for each product of training; in bf16 at full width, for all kernels and the experts of decoding."""
    item = 4 if dtype == "fp32" else 2
    size: dict[str, Any] = {"width": width, "tma": arch >= 90 and item == 2 and width == WIDTH}
    for count in (1, 3, 0):  # 0: experts
        found = products(count, item, **size) if count else of_experts(item, **size)
        if (dtype, width) == ("bf16", WIDTH):
            found = chain(found, layers(count) if count else of_steps(item))
        for kernel, given, sizes in found:
            made = compiled(kernel, dtype, given, sizes, arch)
            row = {"kernel": kernel, "modules": count, "gate": given.get("GATE", 0), "shared": made.metadata.shared}
            more = resources(made) if kernel.startswith(("expert_", "step_", "order_")) else {}
            print(json.dumps(row | more | loads(made)))


def loads(kernel: Any) -> dict[str, int]:
    """Return the number of loads of single values and of asynchronous copies of a compiled kernel."""
    ptx = kernel.asm["ptx"]
    copies = ptx.count("cp.async.c") + ptx.count("cp.async.bulk.tensor")
    return {"narrow_loads": ptx.count("ld.global.b16"), "wide_copies": copies}


if __name__ == "__main__":
    arch = int(sys.argv[1])
    if sys.argv[2:]:
        report_training(arch, sys.argv[2], int(sys.argv[3]))
    else:
        report_decoding(arch)
        report_training(arch, "bf16", WIDTH)
