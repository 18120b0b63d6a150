from __future__ import annotations

from pathlib import Path

import pytest

from bench.cycle.load import Load
from bench.cycle.phases import PHASES, Op, measure_phases, phase_of
from bench.support.model import build
from cotrain_workers.engine.engine import Engine


@pytest.mark.parametrize(
    ("name", "shapes", "phase"),
    [
        ("aten::mm", [[4096, 512], [512, 1536]], "base GEMM"),
        ("aten::mm", [[16, 512], [512, 64]], "LoRA"),
        ("aten::mm", [[48, 512], [512, 64]], "LoRA"),  # q, k and v in one product
        ("aten::addmm_", [[64, 512], [64, 16], [16, 512]], "LoRA"),
        ("cotrain::lora_shrink", [[4096, 512]], "LoRA"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[1, 8, 64, 64]], "attention"),
        ("torch_attn::_varlen_attn", [[4096, 8, 64]], "attention"),
        ("aten::embedding", [[4096, 512], [1, 4096]], "embed"),
        ("aten::mul", [[1, 4096, 1536], [1, 4096, 1536]], "elementwise"),
    ],
)
def test_an_op_of_the_model_is_classified_by_its_name_and_shapes(
    name: str, shapes: list[list[int]], phase: str
) -> None:
    assert phase_of(Op(name, shapes, in_head=False, in_wave=True)) == phase


def test_ops_in_the_head_or_outside_the_wave_are_classified_there() -> None:
    shapes = [[16, 512], [512, 64]]

    assert phase_of(Op("aten::mm", shapes, in_head=True, in_wave=True)) == "head"
    assert phase_of(Op("aten::mul", shapes, in_head=False, in_wave=False)) == "optimizer"


def test_the_phases_of_a_cycle_add_up_to_its_time(tmp_path: Path) -> None:
    engine = Engine.load(str(build(tmp_path, "tiny")))

    row = measure_phases(engine, Load(4, 40, (4,)), 4, "cpu")

    assert set(row["ms"]) == set(PHASES)
    assert sum(row["ms"].values()) == pytest.approx(row["profiled_ms"])
    assert all(row["ms"][phase] > 0 for phase in PHASES)
