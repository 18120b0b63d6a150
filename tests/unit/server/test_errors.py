"""Status and message of every error, from one table, and safe to show to a tenant."""

from __future__ import annotations

from typing import Any

import pytest

from cotrain_server import errors
from cotrain_server.errors import code_of, sentence, status_of
from cotrain_store import errors as store


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (store.InvalidKey(), 401),
        (store.ExpiredKey(), 401),
        (store.RunNotFound(), 404),
        (store.RequestNotFound(), 404),
        (store.BaseModelNotServed(), 400),
        (store.SeqConflict(), 400),
        (store.SeqTooFar(), 400),
        (store.RunClosed(), 400),
        (store.SessionFinished(), 410),
        (store.QueueFull(), 429),
        (store.RunQuotaReached(), 429),
        (store.DiskReserveReached(), 503),
        (store.StoreUnavailable(), 503),
        (store.SpoolCorrupt(), 500),
        (errors.BodyTooLarge(), 413),
        (errors.OperatorsOnly(), 404),
    ],
)
def test_an_error_has_the_status_that_sdks_handle_correctly(error: Exception, status: int) -> None:
    assert status_of(error) == status


def test_no_refusal_has_a_status_that_sdks_retry_silently() -> None:
    refusals = [status_of(error()) for error in store.Refused.__subclasses__()]
    assert not {402, 408, 409} & set(refusals)


def test_a_code_is_the_name_of_the_error_in_lower_case() -> None:
    assert code_of(store.BaseModelNotServed()) == "base_model_not_served"


def test_a_schema_error_has_its_field_and_the_number_of_further_ones() -> None:
    found: list[dict[str, Any]] = [
        {"loc": ("body", "data", 3, "tokens"), "msg": "Input should be a list", "input": "secret"},
        {"loc": ("body", "x"), "msg": "Field required"},
    ]
    assert sentence(found) == "data[3].tokens: Input should be a list (and 1 more)."
    assert sentence([{"loc": ("body",), "msg": "Field required"}]) == "Field required."
    assert sentence([{"loc": (), "msg": "Value error, send one"}]) == "send one."
