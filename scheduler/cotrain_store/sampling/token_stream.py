"""Live transfer of the tokens of a streaming sample request from its worker to the API.

Nothing is stored. A follower that subscribes late, or reads too slowly, has a gap in `before`,
which the final result fills.
"""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import astuple, dataclass

from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId
from cotrain_store.redis_client.connection import ChannelSubscriber, Connection, SyncConnection

#: Maximum number of messages kept for a slow follower; the final result contains the rest.
MAX_UNREAD = 4_096


@dataclass(frozen=True)
class StreamedTokens:
    """Some new tokens of one sequence of a request."""

    sequence: int
    before: int  # number of earlier tokens of this sequence
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class TokenPublisher:
    """Publisher of tokens, in a worker."""

    def __init__(self, connection: SyncConnection) -> None:
        self._redis = connection

    def publish(self, request: RequestId, events: Iterable[StreamedTokens]) -> None:
        """Publish to the subscribers of this request, if any."""
        message = [request, [astuple(event) for event in events]]
        self._redis.publish(redis_keys.notify_tokens(), json.dumps(message, separators=(",", ":")))


class TokenFeed:
    """Tokens of one request, for `async for`; ends when it is closed."""

    def __init__(self) -> None:
        self._unread: asyncio.Queue[StreamedTokens | None] = asyncio.Queue()

    def put(self, event: StreamedTokens) -> None:
        """Add new tokens."""
        if self._unread.qsize() < MAX_UNREAD:
            self._unread.put_nowait(event)

    def close(self) -> None:
        """End the iteration after the tokens received so far. Idempotent."""
        self._unread.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[StreamedTokens]:
        """Yield tokens until closed."""
        while (event := await self._unread.get()) is not None:
            yield event


class TokenStream(ChannelSubscriber):
    """Receiver of tokens, in the API: one subscription per process."""

    def __init__(self, connection: Connection) -> None:
        self._feeds: defaultdict[str, set[TokenFeed]] = defaultdict(set)
        super().__init__(connection, redis_keys.notify_tokens(), self._receive)

    @override
    async def __aexit__(self, *_: object) -> None:
        """Stop listening; every feed ends."""
        await super().__aexit__()
        for feeds in self._feeds.values():
            for feed in feeds:
                feed.close()

    @contextlib.contextmanager
    def follow(self, request: RequestId) -> Iterator[TokenFeed]:
        """Collect a request's tokens from now on; enter before it is submitted to miss none.

        The stream does not report the end of the request: close the feed once its result is
        available (`waiting.add_done_callback(lambda _: feed.close())`).
        """
        feed = TokenFeed()
        self._feeds[request].add(feed)
        try:
            yield feed
        finally:
            self._feeds[request].discard(feed)
            if not self._feeds[request]:
                del self._feeds[request]

    async def _receive(self, message: bytes | None) -> None:
        if message is None:
            return  # missed tokens are a gap that the final result fills
        request, events = json.loads(message)
        for feed in self._feeds.get(request, ()):
            for sequence, before, tokens, logprobs in events:
                feed.put(StreamedTokens(sequence, before, tuple(tokens), tuple(logprobs)))
