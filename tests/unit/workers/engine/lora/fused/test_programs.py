"""Compilation of the kernels, which Triton's interpreter does not test, and their fit on a GPU that is not present."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.lora_problem import needs_kernels

pytestmark = needs_kernels

#: Shared memory of one program on an A100 and an H100.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
#: Largest spill of one thread of an attention kernel, for prompts with heads of 256 values.
SPILLED_BYTES = 160
#: The same of LoRA in decoding.
SPILLED_BY_LORA = 4
#: The same of a product of experts. Gates and their gradients take more registers than there are: 840 bytes with Triton 3.6.
SPILLED_BY_GATES = 850
#: The same of experts in a decoder step: a gate with tiles of prompts on an A100.
SPILLED_IN_STEPS = 8


@pytest.mark.parametrize("arch", [80, 90])
def test_every_kernel_compiles_and_fits(arch: int, tmp_path: Path) -> None:
    rows = compiled(tmp_path, arch)

    assert len(rows) == 36 + 24 + 18 + 15 + 13
    assert all(row["shared"] <= SHARED_BYTES[arch] for row in rows), rows
    # Without the hint of alignment, each value of a LoRA matrix is loaded by itself.
    assert not any(row["narrow_loads"] for row in rows if "shrink" in row["kernel"]), rows
    assert all(row["wide_copies"] for row in rows if row["kernel"] == "shrink_rows"), rows
    attention = [row for row in rows if row["kernel"] in ("attend", "combine")]
    assert len(attention) == 24
    assert all(row["spilled"] <= SPILLED_BYTES for row in attention), attention
    loras = [row for row in rows if row["kernel"] in ("shrink_rows", "expand_rows")]
    assert len(loras) == 18
    assert all(row["spilled"] <= SPILLED_BY_LORA and row["registers"] <= 128 for row in loras), loras
    experts = [row for row in rows if row["kernel"].startswith("expert_")]
    assert all(row["spilled"] <= SPILLED_BY_GATES for row in experts), experts
    steps = [row for row in rows if row["kernel"].startswith(("step_", "order_"))]
    assert all(row["spilled"] <= SPILLED_IN_STEPS for row in steps), steps


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 64), ("fp32", 4096), ("fp32", 64)])
def test_products_of_small_models_and_of_fp32_compile_and_fit(dtype: str, width: int, tmp_path: Path) -> None:
    rows = compiled(tmp_path, 90, dtype, width)

    assert len(rows) == 16 + 15
    assert all(row["shared"] <= SHARED_BYTES[90] for row in rows), rows


def compiled(cache: Path, *asked: object) -> list[dict[str, Any]]:
    """Return the reports of kernels that `compile_kernels` compiles with these arguments."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET")  # the interpreter would compile nothing
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", *map(str, asked)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]
