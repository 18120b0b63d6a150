"""One tenant's bodies in the memory of one process."""

from __future__ import annotations

import pytest

from cotrain_server.errors import TooManyBodies
from cotrain_server.limits.body_memory import BodyMemory
from cotrain_store.messages.ids import TenantId

A, B = TenantId("a"), TenantId("b")


def test_bodies_of_one_tenant_share_a_limit_until_they_are_answered() -> None:
    memory = BodyMemory(most_bytes=10)
    with memory.of(A) as first:
        first(6)
        with memory.of(B) as of_another:
            of_another(10)
        with memory.of(A) as second:
            second(4)
            with pytest.raises(TooManyBodies):
                second(1)
            with pytest.raises(TooManyBodies):
                first(1)
        first(4)
    with memory.of(A) as third:
        third(10)


def test_a_body_that_is_alone_is_always_let_in_and_keeps_others_out() -> None:
    memory = BodyMemory(most_bytes=10)
    with memory.of(A) as large:
        large(8)
        large(8)
        with memory.of(A) as small, pytest.raises(TooManyBodies):
            small(1)


def test_a_body_that_was_refused_leaves_nothing_behind() -> None:
    memory = BodyMemory(most_bytes=10)

    def broken() -> None:
        with memory.of(A) as take:
            take(9)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert not memory._bytes_by_tenant
