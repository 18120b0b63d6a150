"""Programs that learn from another model's log-probs, or from what people preferred."""

from __future__ import annotations

import math
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from tests.cookbook.workshop import BASE_MODEL, LESSONS

if TYPE_CHECKING:
    from tests.cookbook.programs import Bench

SMALL = {"model_name": BASE_MODEL, "learning_rate": 1e-2}
RANK = {"lora_rank": 8}

pytestmark = pytest.mark.cookbook


def test_dpo_moves_away_from_its_reference(bench: Bench) -> None:
    options = {"batch_size": 8, "max_steps": 4, "max_length": 512}
    ran = bench.run("preference.dpo.train", "dpo", **SMALL, **options)
    assert ran.status == 0, ran.output
    losses, margins = ran.series("dpo_loss"), ran.series("margin")
    assert losses[0] == pytest.approx(math.log(2))
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert losses[-1] < 0.1
    assert ran.steps[-1]["accuracy"] == 1
    (final,) = ran.checkpoints
    assert {"state_path", "sampler_path"} <= final.keys()


def test_on_policy_distillation_comes_nearer_to_its_teacher(bench: Bench) -> None:
    lessons = {"dataset": LESSONS, "renderer_name": "qwen3_instruct", "batch_size": 4}
    taught = bench.run("chat_sl.train", "teacher", **SMALL, **RANK, **lessons, max_steps=16)
    assert taught.status == 0, taught.output
    ran = bench.run(
        "distillation.on_policy_distillation",
        "distillation",
        **SMALL,
        **RANK,
        teacher_model=BASE_MODEL,
        teacher_checkpoint=taught.checkpoints[-1]["sampler_path"],
        groups_per_batch=8,
        max_tokens=16,
        max_steps=6,
    )
    assert ran.status == 0, ran.output
    distances = ran.series("teacher_kl")
    assert distances[0] > 1
    assert mean(distances[3:]) < distances[0] / 4
