"""Carry the tokens of a streaming sample request from its worker to the API, as they come.

Nothing is stored: who comes late, or too slowly, sees a hole in `before`, which the final result
fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from cotrain_store.connection import Connection, SyncConnection
    from cotrain_store.messages import RequestId


@dataclass(frozen=True)
class StreamedTokens:
    """Some new tokens of one sequence of a request."""

    sequence: int
    before: int
    """How many tokens of this sequence came before these."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class TokenPublisher:
    """The worker's end."""

    def __init__(self, connection: SyncConnection) -> None:
        raise NotImplementedError

    def publish(self, request: RequestId, events: Iterable[StreamedTokens]) -> None:
        """Tell whoever follows this request; nobody may."""
        raise NotImplementedError


class TokenFeed:
    """The tokens of one request, for `async for`; ends when it is closed."""

    def close(self) -> None:
        """End the iteration after what has come so far; twice is harmless."""
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[StreamedTokens]:
        raise NotImplementedError


class TokenStream:
    """The API's end: one subscription per process."""

    def __init__(self, connection: Connection) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Start listening."""
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Stop listening; every feed ends."""
        raise NotImplementedError

    def follow(self, request: RequestId) -> AbstractContextManager[TokenFeed]:
        """Collect a request's tokens from now on; enter before it is submitted to miss none.

        Nothing here says that the request ended: close the feed once its result is there
        (`waiting.add_done_callback(lambda _: feed.close())`).
        """
        raise NotImplementedError
