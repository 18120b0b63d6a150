"""Preemption of weights for another tenant: as many as needed or none, and none without need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotrain_workers.engine.decoding.sequence import SequenceGroup, SequenceState, TenantQueue
from cotrain_workers.engine.decoding.sequence_pages import LEASE_TOKENS, victims_for_weights
from tests.support.decoding import request

Fits = Callable[[Collection[str]], bool]

PAGE = 4


def queues(*running: tuple[str, str, int]) -> dict[str, TenantQueue]:
    """Return the queues of running sequences (tenant, weights, generated tokens), in the order of arrival."""
    found: dict[str, TenantQueue] = {}
    for arrival, (tenant, weights, tokens) in enumerate(running):
        asked = request(f"r{arrival}", np.array([1]), weights, tenant=tenant)
        sequence = SequenceGroup(asked, arrival, PAGE, 10_000, None).next()
        assert sequence is not None
        sequence.tokens.extend([0] * tokens)
        found.setdefault(tenant, TenantQueue()).running.append(sequence)
    return found


def names(victims: list[SequenceState] | None) -> list[str] | None:
    if victims is None:
        return None
    return sorted(str(each.group.request.weights) for each in victims)


def needs(missing: int, sizes: Mapping[str, int]) -> Fits:
    """Return a check that the given-up weights free at least `missing`."""
    return lambda given_up: sum(sizes[each] for each in given_up) >= missing


def test_only_a_tenant_without_running_weights_takes_recent_ones() -> None:
    running = queues(("heavy", "a", 0), ("light", "mine", 0))

    assert victims_for_weights(running, "new", frozenset("a"), lambda _: True) == []
    assert victims_for_weights(running, "light", frozenset("a"), lambda _: True) is None


def test_weights_are_preempted_only_if_that_frees_enough() -> None:
    running = queues(*[("heavy", key, 0) for key in "abcd"])
    sizes = dict.fromkeys("abcd", 1)

    assert names(victims_for_weights(running, "new", frozenset("abcd"), needs(3, sizes))) == [*"bcd"]
    assert victims_for_weights(running, "new", frozenset("abcd"), needs(4, sizes)) is None
    assert victims_for_weights(running, "new", frozenset("ab"), needs(3, sizes)) is None


def test_the_last_weights_of_a_tenant_are_preempted_after_their_lease() -> None:
    for tokens, expected in ((LEASE_TOKENS - 1, None), (LEASE_TOKENS, ["a", "a"])):
        running = queues(("heavy", "a", tokens), ("heavy", "a", LEASE_TOKENS))
        found = victims_for_weights(running, "new", frozenset("a"), needs(1, {"a": 1}))
        assert names(found) == expected


def test_weights_that_need_not_be_preempted_stay() -> None:
    running = queues(("heavy", "large", 0), ("heavy", "old", 0), ("heavy", "small", 0))
    sizes = {"large": 4, "old": 1, "small": 1}

    found = victims_for_weights(running, "new", frozenset({"large", "small"}), needs(4, sizes))

    assert names(found) == ["large"]


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 11)), max_size=20),
    st.lists(st.integers(1, 8), min_size=12, max_size=12),
    st.integers(0, 20),
)
def test_preemption_is_sufficient_minimal_and_fair(
    running: list[tuple[str, int]], sizes: list[int], missing: int
) -> None:
    tenants = queues(*((tenant, f"{tenant}{weights}", 0) for tenant, weights in running))
    size_of = {f"{tenant}{at}": size for tenant in "xyz" for at, size in enumerate(sizes)}
    used = {tenant: {w for t, w in running if t == tenant} for tenant in "xyz"}
    candidates = frozenset(size_of)
    fits = needs(missing, size_of)

    found = victims_for_weights(tenants, "x", candidates, fits)

    if found is None:
        return
    given_up = {str(each.group.request.weights) for each in found}
    assert fits(given_up)
    assert not any(fits(given_up - {each}) for each in given_up)
    for tenant in "yz":
        lost = sum(each.startswith(tenant) for each in given_up)
        assert not lost or len(used[tenant]) - lost >= len(used["x"]) + 1
    assert not any(each.startswith("x") for each in given_up)
