from __future__ import annotations

import math

import pytest

from cotrain_store.messages.ids import TenantId
from cotrain_store.results.queue_notice import Backlog, sample_notice, training_notice

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def backlog(tokens: dict[TenantId, int], tokens_per_s: float = 100.0) -> Backlog:
    return Backlog(tokens, {}, workers=1, tokens_per_s=tokens_per_s)


@pytest.mark.parametrize(
    ("tokens", "expected_s"),
    [
        ({A: 500}, 5.0),
        ({A: 500, B: 100}, 6.0),
        ({A: 500, B: 10**9, C: 500}, 15.0),  # at most its own tokens count from a heavy neighbour
        ({B: 10**9}, 0.0),
    ],
)
def test_the_wait_of_a_tenant_includes_as_much_from_each_neighbour(
    tokens: dict[TenantId, int], expected_s: float
) -> None:
    assert backlog(tokens).expected_s(A) == pytest.approx(expected_s)


def test_without_a_throughput_no_time_is_estimated() -> None:
    assert backlog({A: 1}, tokens_per_s=0.0).expected_s(A) == math.inf
    assert training_notice(backlog({A: 1}, 0.0), A, 2) == (
        "position 2 in its run's queue, next to 0 other tenants with work"
    )


def test_a_notice_has_position_other_tenants_and_seconds() -> None:
    assert training_notice(backlog({A: 250, B: 7, C: 0}), A, 3) == (
        "position 3 in its run's queue, next to 1 other tenant with work; about 3 s for all that you have sent"
    )


def test_a_sample_notice_has_the_number_of_waiting_requests() -> None:
    busy = Backlog({}, {A: 20, B: 3, C: 1}, workers=1, tokens_per_s=1.0)
    assert sample_notice(busy, A, 7) == (
        "one of your 20 sample requests (7 before it wait), next to 2 other tenants with work"
    )


def test_a_sample_notice_has_the_longest_expected_wait() -> None:
    busy = Backlog(
        {}, {A: 2, B: 1}, workers=1, tokens_per_s=1.0,
        sample_tokens={A: 5_000, B: 10**9, C: 1_000}, sample_tokens_per_s=100.0,
    )  # fmt: skip
    assert sample_notice(busy, A, None) == (
        "one of your 2 sample requests (with a worker), next to 1 other tenant with work; "
        "at most about 110 s for all that you have sent"
    )
