"""Statuses and messages of refusals."""

import pickle
from typing import Any

import pytest

from cotrain_server import errors
from cotrain_server.errors import sentence, status_of
from cotrain_store import errors as store
from cotrain_store.errors import Reason, Refused


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (store.InvalidKey(), 401),
        (store.RunNotFound(), 404),
        (store.SampleExpired(), 410),
        (store.BaseModelNotServed(), 400),
        (Refused(Reason.QUEUE_FULL), 429),
        (store.StoreUnavailable(), 503),
        (store.SpoolCorrupt(), 500),
        (errors.BodyTooLarge(), 413),
        (Refused(Reason.OPERATORS_ONLY), 404),
    ],
)
def test_an_error_has_the_status_of_its_reason(error: Exception, status: int) -> None:
    assert status_of(error) == status


def test_no_refusal_has_a_status_that_sdks_retry_silently() -> None:
    repeated = {reason for reason in Reason if reason.status in (402, 408, 409)}
    assert repeated == {Reason.BODY_TOO_SLOW}  # sent again whole


def test_every_transient_reason_has_a_retry_time() -> None:
    assert all((reason.retry_after_s is not None) == (reason.status in (429, 503)) for reason in Reason)


def test_every_reason_is_distinct() -> None:
    assert len(Reason.__members__) == len(list(Reason))


@pytest.mark.parametrize("error", [Refused(Reason.RUN_FAILED, "x"), errors.Unreadable("x")])
def test_a_refusal_keeps_its_reason_and_message_between_processes(error: Refused) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.reason, str(copy)) == (type(error), error.reason, "x")


def test_a_schema_error_has_its_field_and_the_number_of_further_ones() -> None:
    found: list[dict[str, Any]] = [
        {"loc": ("body", "data", 3, "tokens"), "msg": "Input should be a list", "input": "secret"},
        {"loc": ("body", "x"), "msg": "Field required"},
    ]
    assert sentence(found) == "data[3].tokens: Input should be a list (and 1 more)."
    assert sentence([{"loc": ("body",), "msg": "Field required"}]) == "Field required."
    assert sentence([{"loc": (), "msg": "Value error, send one"}]) == "send one."
