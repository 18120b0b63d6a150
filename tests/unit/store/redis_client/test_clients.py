"""Commands that wait for replicas."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.connection import DefaultParser
from redis.exceptions import ResponseError

from cotrain_store.redis_client.clients import AWAITED, RedisRefuses, acknowledged, name_refusals, named
from cotrain_store.redis_client.connection import CONNECTION_LOST


@pytest.mark.parametrize(
    "call",
    [
        ("hset", "key", "field", "1"), ("hdel", "key", "field"), ("hincrby", "key", "field", 1),
        ("incr", "key"), ("delete", "key"), ("sadd", "key", "1"), ("srem", "key", "1"),
        ("evalsha", "0" * 40, 0), ("eval", "return 1", 0),
    ],
    ids=lambda call: call[0],
)  # fmt: skip
def test_each_write_command_of_the_client_waits_for_replicas(
    call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    client = redis.Redis()
    monkeypatch.setattr(client, "execute_command", lambda name, *_, **__: sent.append(name))
    name, *arguments = call
    getattr(client, name)(*arguments)
    assert sent
    assert set(sent) <= AWAITED


def test_an_answer_counts_once_enough_replicas_have_synced_the_write() -> None:
    assert acknowledged([7, 1, [1, 1]], 1) == 7
    for too_few in ([0, 1], [1, 0]):
        with pytest.raises(RedisRefuses, match="of 1 replicas"):
            acknowledged([7, 1, too_few], 1)
    with pytest.raises(ValueError, match="own"):
        acknowledged([ValueError("its own"), 1, [1, 0]], 1)


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
