from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cotrain_workers.engine.ops import Datum, Pass
from cotrain_workers.engine.training.validation import refuse_pass
from tests.support.training import random_datum

GOOD = random_datum(np.random.default_rng(0), "ppo", 4)
PPO = Pass("a", 1, [GOOD, GOOD], "ppo", {"clip_low_threshold": 0.9}, needs_grad=True)


def refusal(op: Pass) -> str | None:
    return refuse_pass(op, 128, 16)


def with_input(**inputs: np.ndarray) -> Pass:
    return replace(PPO, datums=[GOOD, replace(GOOD, inputs={**GOOD.inputs, **inputs})])


def with_tokens(*tokens: int) -> Pass:
    return replace(PPO, datums=[GOOD, replace(GOOD, tokens=np.array(tokens))])


def test_a_good_pass_is_admitted() -> None:
    assert refusal(PPO) is None


def test_inputs_that_the_loss_does_not_read_are_ignored() -> None:
    assert refusal(with_input(weights=np.ones(99, np.float32))) is None


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (
            with_tokens(0, 1, 2, 128),
            "Token id 128 at position 3 is outside the vocabulary (0..127) (datum 1).",
        ),
        (
            with_tokens(0, -1, 2, 3),
            "Token id -1 at position 1 is outside the vocabulary (0..127) (datum 1).",
        ),
        (
            with_input(target_tokens=np.array([0, 1, 2**40, 3])),
            f"Target token id {2**40} at position 2 is outside the vocabulary (0..127) (datum 1).",
        ),
        (with_tokens(), "A datum has 1 to 16 tokens, not 0 (datum 1)."),
        (with_tokens(*range(17)), "A datum has 1 to 16 tokens, not 17 (datum 1)."),
        (
            with_input(target_tokens=np.zeros(5, np.int64)),
            "target_tokens has shape [5]; it must be [4] or [4, K] (datum 1).",
        ),
        (
            with_input(advantages=np.zeros((4, 1), np.float32)),
            "advantages has shape [4, 1]; target_tokens has [4] (datum 1).",
        ),
        (
            replace(PPO, datums=[Datum(GOOD.tokens, {})]),
            "Loss 'ppo' needs loss_fn_inputs['target_tokens'] (datum 0).",
        ),
        (
            replace(PPO, loss_fn="gspo"),
            "Loss 'gspo' needs loss_fn_inputs['sequence_ratio_mask'] (datum 0).",
        ),
        (replace(PPO, loss_config={"epsilon": 0.2}), "Loss 'ppo' has no setting 'epsilon'."),
    ],
)
def test_a_bad_pass_is_refused_with_its_position(op: Pass, reason: str) -> None:
    assert refusal(op) == reason


def test_an_unknown_loss_names_the_known_ones() -> None:
    reason = refusal(replace(PPO, loss_fn="mse"))

    assert reason is not None
    assert reason.startswith("Unknown loss_fn 'mse'; known are cispo, cross_entropy,")
