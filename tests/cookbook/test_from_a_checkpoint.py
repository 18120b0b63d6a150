"""Programs that start from what another one trained: preference, distillation, taking it home."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean

import pytest

from tests.cookbook.programs import Bench
from tests.cookbook.workshop import BASE_MODEL, LESSONS

SMALL = {"model_name": BASE_MODEL, "learning_rate": 1e-2}
RANK = {"lora_rank": 8}
TAKE_HOME = Path(__file__).with_name("take_home.py")
FLOAT32 = 1e-5
"""Nats per token: merged weights and added low ranks are the same sums, rounded otherwise."""

pytestmark = pytest.mark.cookbook


@pytest.fixture(scope="module")
def taught(bench: Bench) -> dict[str, str]:
    """A run that has learnt to give one answer to all; what its last checkpoint is called."""
    lessons = {"dataset": LESSONS, "renderer_name": "qwen3_instruct", "batch_size": 4}
    ran = bench.run("chat_sl.train", "taught", **SMALL, **RANK, **lessons, max_steps=16)
    assert ran.status == 0, ran.output
    return ran.checkpoints[-1]


def test_dpo_starts_at_its_reference_and_moves_away(bench: Bench, taught: dict[str, str]) -> None:
    options = {"batch_size": 8, "max_steps": 4, "max_length": 512}
    path = taught["state_path"]
    ran = bench.run("preference.dpo.train", "dpo", **SMALL, **options, load_checkpoint_path=path)
    assert ran.status == 0, ran.output
    assert f"Renderer metadata matches for checkpoint {path}: qwen3_instruct" in ran.output
    assert f"Loaded weights from {path}" in ran.output
    losses, margins = ran.series("dpo_loss"), ran.series("margin")
    assert losses[0] == pytest.approx(math.log(2))
    assert margins[0] == pytest.approx(0, abs=FLOAT32)
    assert losses[-1] < 0.1
    assert ran.steps[-1]["accuracy"] == 1
    (final,) = ran.checkpoints
    assert {"state_path", "sampler_path"} <= final.keys()


def test_on_policy_distillation_comes_near_its_teacher(bench: Bench, taught: dict[str, str]) -> None:
    ran = bench.run(
        "distillation.on_policy_distillation",
        "distillation",
        **SMALL,
        **RANK,
        teacher_model=BASE_MODEL,
        teacher_checkpoint=taught["sampler_path"],
        groups_per_batch=8,
        max_tokens=16,
        max_steps=6,
    )
    assert ran.status == 0, ran.output
    distances = ran.series("teacher_kl")
    assert distances[0] > 1
    assert mean(distances[3:]) < distances[0] / 4


def test_a_model_merged_from_a_download_says_what_the_sampler_says(bench: Bench, taught: dict[str, str]) -> None:
    paths = taught["state_path"], taught["sampler_path"]
    said = json.loads(bench.run_script(TAKE_HOME, BASE_MODEL, *paths))
    assert len(said["merged"]) == len(said["sampled"]) > 10
    assert said["merged"] == pytest.approx(said["sampled"], abs=FLOAT32)
    assert said["base"] != pytest.approx(said["sampled"], abs=1)
