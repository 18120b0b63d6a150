"""Conversion of an error to the form of another API."""

import pytest

from cotrain_server.errors import Invalid, TooManyFailures
from cotrain_server.text_apis.generation import GenerationFailed
from cotrain_server.text_apis.route import Refusal, refusal_of
from cotrain_store.errors import (
    BaseModelNotServed,
    CheckpointNotFound,
    InvalidKey,
    Reason,
    Refused,
    SpoolCorrupt,
    StoreUnavailable,
)
from cotrain_store.messages.ops import Category, Result


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Invalid("top_p"), 400),
        (InvalidKey(), 401),
        (BaseModelNotServed(), 404),
        (CheckpointNotFound(), 404),
        (Refused(Reason.SAMPLING_BUSY), 429),
        (TooManyFailures(), 429),
        (StoreUnavailable(), 503),
        (Refused(Reason.SHUTTING_DOWN), 503),
    ],
)
def test_errors_have_the_status_that_clients_expect(error: Exception, status: int) -> None:
    refusal = refusal_of(error)
    assert refusal.status == status
    assert refusal.message == str(error)
    assert (refusal.retry_after_s is not None) == (status in (429, 503))


def test_an_internal_error_is_not_shown_to_a_tenant() -> None:
    refusal = refusal_of(SpoolCorrupt("/data/spool/w0 cannot be read"))
    assert refusal == Refusal(500, "Internal error.", "internal_error")


@pytest.mark.parametrize(("category", "status"), [("user", 400), ("server", 500)])
def test_a_failed_generation_is_a_client_or_a_server_error(category: Category, status: int) -> None:
    refusal = refusal_of(GenerationFailed(Result.failed("The weights are gone.", category)))
    assert refusal[:2] == (status, "The weights are gone.")
