from __future__ import annotations

import numpy as np
import pytest
import torch

from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.ops import Failure, PassOutput, StepOutput
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.fingerprints import Fingerprint, differences, fingerprint_of, fingerprint_of_state

LOOSE = 1e-2
VALUES = torch.tensor([3.0, 4.0])


def of_pass(*logprobs: float, loss: float = 1.0) -> Fingerprint:
    return fingerprint_of(PassOutput([np.array(logprobs, np.float32)], loss))


def of_state(weights: torch.Tensor, *, step: int = 1) -> Fingerprint:
    zeros = torch.zeros(2)
    spec = AdapterSpec(rank=1, seed=0)
    state = AdapterState(spec, weights, zeros, zeros, zeros, step=step, grads_pending=False)
    return fingerprint_of_state(state)


def test_the_last_bit_of_a_number_counts_without_a_tolerance() -> None:
    off = float(np.nextafter(np.float32(-2), np.float32(0)))
    before, after = of_pass(-1, -2, -3), of_pass(-1, off, -3)
    assert differences(before, after, 0.0) == ["log-probs: -2 became -1.99999988 at 1, and 0 more"]
    assert differences(before, after, LOOSE) == []
    assert differences(before, of_pass(-1, -2.5, -4), LOOSE) == ["log-probs: -2 became -2.5 at 1, and 1 more"]


def test_zeros_of_two_signs_differ_and_nan_equals_nan() -> None:
    assert differences(of_pass(0.0), of_pass(-0.0), 0.0)
    nan = float("nan")
    for tolerance in (0.0, LOOSE):
        assert differences(of_pass(nan), of_pass(nan), tolerance) == []
        assert differences(of_pass(nan), of_pass(1.0), tolerance)


def test_every_number_of_an_output_is_compared() -> None:
    assert differences(of_pass(-1), of_pass(-1, loss=2.0), 0.0) == ["loss: 1 became 2"]
    assert differences(of_pass(-1), of_pass(-1, -1), 0.0) == ["log-probs: 1 values became 2"]
    one, two = fingerprint_of(StepOutput(0.5)), fingerprint_of(StepOutput(0.75))
    assert differences(one, two, LOOSE) == ["gradient norm: 0.5 became 0.75"]


def test_text_is_compared_with_any_tolerance() -> None:
    one = fingerprint_of(Failure("Loss is not finite (seq 1).", "user"))
    assert differences(one, of_pass(-1), LOOSE) == ["'user error: Loss is not finite (seq 1).' became 'pass'"]
    assert differences(of_state(VALUES), of_state(VALUES, step=2), LOOSE)


def test_a_state_with_other_bits_and_the_same_norm_differs() -> None:
    before, after = of_state(VALUES), of_state(VALUES.flip(0))
    assert differences(before, after, 0.0) == ["weights: other bits, of the same norm 5"]
    assert differences(before, after, LOOSE) == []
    assert differences(before, of_state(VALUES * 1.001), LOOSE) == []
    assert differences(before, of_state(VALUES * 1.5), LOOSE) == ["weights: norm 5 became 7.5"]


@pytest.mark.parametrize("other", [of_pass(-1, -3), of_pass(-1, -2, loss=2.0), of_pass(-1), of_state(VALUES)])
def test_a_digest_includes_every_compared_value(other: Fingerprint) -> None:
    assert of_pass(-1, -2).digest == of_pass(-1, -2).digest != other.digest


def test_a_digest_of_a_state_includes_its_arrays() -> None:
    assert of_state(VALUES).digest == of_state(VALUES.clone()).digest
    assert of_state(VALUES).digest != of_state(VALUES.flip(0)).digest
