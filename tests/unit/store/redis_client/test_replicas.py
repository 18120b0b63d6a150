"""Commands that wait for replicas."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from cotrain_store.redis_client.refusals import RedisRefuses
from cotrain_store.redis_client.replicas import AWAITED, acknowledged


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
