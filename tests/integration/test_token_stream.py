"""Tokens on their way from a worker to an API process."""

from __future__ import annotations

import asyncio

import pytest

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId
from cotrain_store.sampling.token_stream import StreamedTokens, TokenFeed, TokenPublisher, TokenStream
from tests.support.samples import Samples
from tests.support.waiting import until

REQUEST, OTHER = RequestId("s:sample:0:1"), RequestId("s:sample:0:2")
FIRST = StreamedTokens(0, 0, (5, 6), (-0.5, -1.25))
SECOND = StreamedTokens(1, 2, (7,), (-3e-9,))
PATIENCE_S = 120.0


async def listened_to(samples: Samples) -> None:
    channel = redis_keys.notify_tokens()
    await until(lambda: samples.log.redis.pubsub_numsub(channel) == [(channel.encode(), 1)])


async def read(feed: TokenFeed, count: int) -> list[StreamedTokens]:
    found = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in feed:
            found.append(event)
            if len(found) == count:
                break
    return found


async def test_who_follows_a_request_gets_its_tokens_to_the_last_bit(samples: Samples) -> None:
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as feed, stream.follow(REQUEST) as same:
            publisher.publish(OTHER, [SECOND])
            publisher.publish(REQUEST, [FIRST, SECOND])
            publisher.publish(REQUEST, [FIRST])
            assert await read(feed, 3) == await read(same, 3) == [FIRST, SECOND, FIRST]


async def test_a_closed_feed_ends_after_what_has_come(samples: Samples) -> None:
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as feed, stream.follow(REQUEST) as witness:
            publisher.publish(REQUEST, [FIRST])
            await read(witness, 1)
            feed.close()
            feed.close()
            assert [event async for event in feed] == [FIRST]


async def test_every_feed_ends_with_its_process(samples: Samples) -> None:
    stream = TokenStream(samples.log.connection)
    async with stream:
        manager = stream.follow(REQUEST)
        feed = manager.__enter__()
    assert [event async for event in feed] == []
    manager.__exit__(None, None, None)


async def test_one_who_reads_slowly_loses_tokens_and_nobody_waits_for_it(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotrain_store.sampling.token_stream.MAX_UNREAD", 2)
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as slow, stream.follow(OTHER) as witness:
            publisher.publish(REQUEST, [FIRST, FIRST, SECOND])
            publisher.publish(OTHER, [SECOND])
            await read(witness, 1)
            slow.close()
            assert [event async for event in slow] == [FIRST, FIRST]


async def test_a_new_subscription_goes_on(samples: Samples) -> None:
    publisher = TokenPublisher(samples.log.redis)
    async with TokenStream(samples.log.connection) as stream:
        await listened_to(samples)
        with stream.follow(REQUEST) as feed:
            samples.log.redis.execute_command("CLIENT KILL TYPE pubsub")
            await listened_to(samples)
            publisher.publish(REQUEST, [SECOND])
            assert await read(feed, 1) == [SECOND]
