from __future__ import annotations

from bench.cycle.presets import Target
from bench.cycle.verdict import judge, judge_order

COST = Target("many_over_one", 64, 512, 1.05)
SPEED = Target("tokens_per_s", 64, 512, 15_000.0)
PHASES = [
    {
        "backend": "seg",
        "tenants": 1,
        "length": 512,
        "ms": {"base GEMM": 900.0, "LoRA": 60.0, "head": 100.0},
    },
    {"backend": "grouped", "tenants": 64, "length": 512, "ms": {"base GEMM": 1e6, "LoRA": 1.0}},
    {
        "backend": "seg",
        "tenants": 64,
        "length": 512,
        "ms": {"base GEMM": 910.0, "LoRA": 160.0, "head": 120.0},
    },
]


def row(**figures: float) -> dict[str, object]:
    return {"tenants": 64, "length": 512, "backend": "seg", **figures}


def test_a_cost_may_be_at_most_its_bound() -> None:
    assert judge(COST, [row(many_over_one=1.05)], [], []).startswith("kept")
    assert judge(COST, [row(many_over_one=1.06)], [], []).startswith("MISSED")


def test_a_speed_must_be_at_least_its_bound() -> None:
    assert judge(SPEED, [row(tokens_per_s=15_000)], [], []).startswith("kept")
    assert judge(SPEED, [row(tokens_per_s=14_999)], [], []).startswith("MISSED")


def test_a_missed_cost_names_the_phase_with_the_largest_increase() -> None:
    assert "LoRA: 100 ms more" in judge(COST, [row(many_over_one=1.2)], [], PHASES)


def test_a_missed_speed_names_the_largest_phases() -> None:
    assert "base GEMM 76%, then LoRA 13%" in judge(SPEED, [row(tokens_per_s=1)], [], PHASES)


def test_a_part_that_did_not_run_does_not_pass() -> None:
    others = [{**row(many_over_one=1.0), "tenants": 16}]

    assert judge(COST, others, [], []).startswith("not measured")
    assert judge(Target("over_loop", 64, 512, 2.5), [], [row()], []).startswith("not measured")


def test_backends_are_ranked_for_each_load() -> None:
    rows = [
        {**row(tokens_per_s=speed), "backend": backend, "tenants": tenants}
        for tenants, backend, speed in (
            (1, "seg", 100), (64, "seg", 50), (1, "fused", 80), (64, "fused", 200), (64, "grouped", 150),
        )
    ]  # fmt: skip

    assert judge_order(rows) == [
        "LoRA at 1 tenants, 512 tokens a sequence: seg 1.00, fused 0.80",
        "LoRA at 64 tenants, 512 tokens a sequence: fused 1.00, grouped 0.75, seg 0.25",
    ]
    assert judge_order(rows[:2]) == []
