from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cotrain_store.bodies.reverse_kl_body import (
    KlArrays,
    ReverseKlBody,
    decode_reverse_kl,
    encode_reverse_kl,
    reverse_kl_answer,
)
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import WeightsRef

ONE = KlArrays(
    np.array([5, 6, 7]),
    np.array([9]),
    np.array([1, 2, 3]),
    np.array([0.5, 0, -2], np.float32),
    np.arange(30, dtype=np.int16).reshape(5, 3, 2),
)
OTHER = KlArrays(np.array([1]), np.array([2, 3]), np.array([4]), np.array([1.0], np.float32))
BODY = ReverseKlBody(WeightsRef("session:train:0:7"), 0.7, (ONE, OTHER))


def test_a_body_is_unchanged_by_encoding_and_decoding() -> None:
    back = decode_reverse_kl(encode_reverse_kl(BODY))

    assert (back.reference, back.temperature) == (BODY.reference, BODY.temperature)
    assert encode_reverse_kl(back) == encode_reverse_kl(BODY)
    for ours, theirs in zip(back.datums, BODY.datums, strict=True):
        np.testing.assert_array_equal(ours.student_context, theirs.student_context, strict=True)
        np.testing.assert_array_equal(ours.reference_context, theirs.reference_context)
        np.testing.assert_array_equal(ours.targets, theirs.targets)
        np.testing.assert_array_equal(ours.weights, theirs.weights, strict=True)
        np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)


def test_the_base_model_is_not_a_reference_by_name() -> None:
    assert decode_reverse_kl(encode_reverse_kl(replace(BODY, reference=None))).reference is None


def test_the_last_target_is_only_predicted() -> None:
    assert ONE.student_tokens.tolist() == [5, 6, 7, 1, 2]
    assert ONE.reference_tokens.tolist() == [9, 1, 2]
    assert BODY.num_tokens == (5 + 3) + (1 + 2)


@pytest.mark.parametrize("cut", [0, 3, 10, -1])
def test_a_truncated_body_is_malformed(cut: int) -> None:
    with pytest.raises(MalformedBody):
        decode_reverse_kl(encode_reverse_kl(BODY)[:cut])


def test_an_answer_has_the_sum_and_the_terms_of_each_datum() -> None:
    losses = [np.array([0.5, 0.25], np.float32), np.array([1.0], np.float32)]

    answer = reverse_kl_answer(losses, {"loss:sum": 1.75})

    assert answer == {
        "outputs": [
            {
                "loss": {"data": [0.75], "shape": [1], "dtype": "float32"},
                "token_losses": {"data": [0.5, 0.25], "shape": [2], "dtype": "float32"},
            },
            {
                "loss": {"data": [1.0], "shape": [1], "dtype": "float32"},
                "token_losses": {"data": [1.0], "shape": [1], "dtype": "float32"},
            },
        ],
        "metrics": {"loss:sum": 1.75},
        "type": "mint_forward_backward_reverse_kl",
    }
