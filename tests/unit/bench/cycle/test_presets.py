from __future__ import annotations

from bench.cycle.presets import PRESETS, Target

COST = Target("many_over_one", 64, 512, 1.05)
SPEED = Target("tokens_per_s", 64, 512, 15_000.0)


def row(**figures: float) -> dict[str, object]:
    return {"tenants": 64, "length": 512, "backend": "seg", **figures}


def test_a_cost_may_be_at_most_its_bound_and_a_speed_must_be_at_least_it() -> None:
    costs = COST.verdicts([row(many_over_one=1.05), row(many_over_one=1.06)])
    speeds = SPEED.verdicts([row(tokens_per_s=15_000), row(tokens_per_s=14_999)])

    for kept, missed in (costs, speeds):
        assert kept.startswith("kept: ")
        assert missed.startswith("MISSED: ")
        assert "64 tenants, 512 tokens a sequence, seg: " in missed


def test_a_figure_that_was_not_measured_is_not_kept() -> None:
    others = [{**row(many_over_one=1.0), "tenants": 16}]

    (sentence,) = COST.verdicts(others)
    assert sentence.startswith("not measured: many_over_one at 64 tenants")


def test_each_bound_of_a_preset_applies_to_the_most_tenants_of_its_load() -> None:
    assert [*PRESETS["h200"].targets()] == [
        Target("tokens_per_s", 32, 2048, 15_000.0),
        Target("over_loop", 64, 512, 2.5),
        Target("many_over_one", 64, 512, 1.05),
    ]
    assert [target.figure for target in PRESETS["cuda"].targets()] == ["many_over_one"]
