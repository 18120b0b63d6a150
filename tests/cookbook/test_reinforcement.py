"""Programs of reinforcement learning: they sample, score and train on what they sampled."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

import pytest

from tests.cookbook.programs import Bench, Ran
from tests.cookbook.workshop import BASE_MODEL

#: The recipes' own default, stable_reinforce, has no published formula.
LOSS = {"loss_fn": "importance_sampling"}
SMALL = {"model_name": BASE_MODEL, "learning_rate": 1e-2, "save_every": 4}
ROUNDING = 1e-5
"""Nats per token, in float32: samples are scored as the trainer scores them."""


@pytest.mark.variants
def test_rl_loop_learns_from_its_own_samples(bench: Bench) -> None:
    options = {"batch_size": 8, "group_size": 8, "max_tokens": 8, "max_steps": 5, "lora_rank": 8}
    ran = bench.run("rl_loop", "rl_loop", **SMALL, **LOSS, **options)
    assert ran.status == 0, ran.output
    rewards = ran.series("reward/total")
    assert len(rewards) == 5
    assert mean(rewards[2:]) > rewards[0] + 0.3
    assert [row["name"] for row in ran.checkpoints] == ["000004", "final"]


@pytest.mark.cookbook
def test_rl_loop_is_told_why_its_default_loss_is_refused(bench: Bench) -> None:
    ran = bench.run("rl_loop", "refused", **SMALL, batch_size=8, group_size=2, max_steps=1)
    assert ran.status == 1
    assert "the loss stable_reinforce, whose formula is not published" in ran.output


@pytest.mark.cookbook
def test_math_rl_learns_to_end_its_turn(bench: Bench) -> None:
    options = {"groups_per_batch": 8, "group_size": 8, "max_tokens": 5, "max_steps": 6}
    also = {"eval_every": 0, "compute_post_kl": True}
    ran = bench.run("math_rl.train", "math_rl", **SMALL, **LOSS, **options, **also)
    assert_sampled_as_trained(ran, steps=6)
    ended = ran.series("env/all/format")
    assert mean(ended[3:]) > ended[0] + 0.2
    assert [row["name"] for row in ran.checkpoints] == ["000004", "final"]


@pytest.mark.cookbook
@pytest.mark.parametrize(
    "mode",
    [
        {"max_steps_off_policy": 1},
        {"stream_minibatch_config.groups_per_batch": 4, "stream_minibatch_config.num_minibatches": 2},
    ],
    ids=["off policy", "in streams"],
)
def test_math_rl_trains_while_it_samples(bench: Bench, mode: Mapping[str, int]) -> None:
    options = {"groups_per_batch": 4, "group_size": 8, "max_tokens": 5, "max_steps": 3}
    folder = "-".join(mode)
    ran = bench.run("math_rl.train", folder, **SMALL, **LOSS, **options, **mode, eval_every=0)
    assert ran.status == 0, ran.output
    assert ran.steps[0]["grad_norm"] > 0
    assert ran.steps[-1]["step"] == 2
    assert ran.checkpoints[-1]["name"] == "final"


@pytest.mark.cookbook
def test_guess_number_plays_whole_games(bench: Bench) -> None:
    options = {"batch_size": 2, "group_size": 4, "max_tokens": 12, "max_steps": 3, "eval_every": 0}
    ran = bench.run("multiplayer_rl.guess_number.train", "guess", **SMALL, **options, renderer_name="qwen3")
    assert_sampled_as_trained(ran, steps=3)
    assert max(ran.series("env/all/turns_per_episode")) == 10
    rewards = ran.series("env/all/reward/total")
    assert max(rewards[1:]) > rewards[0]


def assert_sampled_as_trained(ran: Ran, steps: int) -> None:
    """Every step trained, and its samples had the log-probs that training computes."""
    assert ran.status == 0, ran.output
    assert [row["step"] for row in ran.steps] == list(range(steps))
    assert ran.steps[0]["grad_norm"] > 0  # later on, all of a group may have earned the same
    assert max(map(abs, ran.series("optim/kl_sample_train_v1"))) < ROUNDING
