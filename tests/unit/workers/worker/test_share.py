"""Neither training nor sampling starves: the bound of the policy, over any prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_workers.worker.share import Share

shares = st.floats(0.0, 0.9)
seconds = st.floats(1e-4, 30.0)


@given(shares, st.lists(st.tuples(seconds, st.lists(seconds, min_size=1)), min_size=1))
def test_over_any_prefix_each_keeps_its_share_up_to_one_step(
    sampling_share: float, visits: list[tuple[float, list[float]]]
) -> None:
    """Each visit: a stretch of training, then decode steps (of these lengths, again and again)."""
    share = Share(sampling_share)
    trained = decoded = longest_stretch = longest_step = 0.0
    for stretch, steps in visits:
        longest_stretch = max(longest_stretch, stretch)
        trained += stretch
        share.trained(stretch)
        assert decoded >= sampling_share * (trained + decoded - longest_stretch) - 1e-6
        at = 0
        while share.may_decode and at < 10_000:
            step = max(steps[at % len(steps)], stretch / 100)
            at += 1
            longest_step = max(longest_step, step)
            decoded += step
            share.decoded(step)
            both = trained + decoded
            assert trained >= (1 - sampling_share) * (both - longest_step) - 1e-6


def test_a_decoder_that_had_nothing_to_do_saves_nothing_up() -> None:
    share = Share(0.5)
    share.trained(100.0)
    share.forfeit()
    share.trained(1.0)
    share.decoded(1.0)
    assert not share.may_decode


def test_what_a_long_decode_step_took_too_much_is_paid_back_before_the_next() -> None:
    share = Share(0.5)
    share.trained(1.0)
    share.decoded(4.0)
    share.forfeit()
    share.trained(2.9)
    assert not share.may_decode
    share.trained(0.2)
    assert share.may_decode


@pytest.mark.parametrize("stretch", [0.0, 1.0, 1e6])
def test_with_no_share_the_decoder_waits_until_training_rests(stretch: float) -> None:
    share = Share(0.0)
    share.trained(stretch)
    assert not share.may_decode
