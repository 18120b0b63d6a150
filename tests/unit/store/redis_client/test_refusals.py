from __future__ import annotations

from typing import Any

import pytest
from redis.connection import DefaultParser
from redis.exceptions import ResponseError

from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.redis_client.refusals import name_refusals, named

PASSING = ["BUSY", "UNKILLABLE", "MISCONF", "NOREPLICAS", "READONLY", "LOADING", "OOM"]


def reply(code: str) -> Any:
    """Parse an error reply as redis-py does."""
    name_refusals()
    return DefaultParser.parse_error(f"{code} for now")  # type: ignore[no-untyped-call]  # it has no types


@pytest.mark.parametrize("code", PASSING)
def test_a_transient_error_reply_counts_as_a_lost_connection(code: str) -> None:
    assert isinstance(reply(code), CONNECTION_LOST)


@pytest.mark.parametrize("code", ["ERR", "WRONGTYPE", "NOSCRIPT", "BUSYKEY"])
def test_any_other_error_reply_is_an_error(code: str) -> None:
    assert not isinstance(reply(code), CONNECTION_LOST)


@pytest.mark.parametrize("code", sorted(set(PASSING) - {"LOADING"}))
def test_a_transient_error_in_a_script_of_an_old_redis_is_detected(code: str) -> None:
    text = f"Error running script (call to f_1): @user_script:3: @user_script: 3: -{code} for now"
    assert isinstance(named(ResponseError(text)), CONNECTION_LOST)
    assert not isinstance(named(ResponseError(text.replace(" -", " "))), CONNECTION_LOST)
