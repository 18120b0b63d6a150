"""Tell a client which of its sample requests have ended: one poll for all of them.

Each client (a sampler and the number of its clone) has a list of its own. A cursor names a place in
it; what lies before a cursor that came back is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from cotrain_store.connection import Connection
    from cotrain_store.messages import RequestId, SamplerRecord

#: How long a poll without a timeout is held.
HOLD_S = 30.0


@dataclass(frozen=True)
class Completion:
    """One sample request that has ended."""

    request: RequestId
    failed: bool
    size: int
    """Bytes of its result; 0 where it is not known any more."""


class Completions:
    """One API process's waiting room for polls of many requests at once."""

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
        """Stop listening; whoever still waits gets nothing new."""
        raise NotImplementedError

    def release_all(self) -> None:
        """Answer every poll now, and from now on at once: this process is draining."""
        raise NotImplementedError

    async def wait(
        self, sampler: SamplerRecord, clone: int, after: int, timeout_s: float | None
    ) -> tuple[list[Completion], int]:
        """Hold until something ended after the cursor `after`, or `timeout_s` (HOLD_S) is over.

        Returns what ended, oldest first, and the cursor behind it. The same is told again until a
        later call names that cursor. A Redis that does not answer is a pause, never an error.
        """
        raise NotImplementedError

    async def acknowledge(self, sampler: SamplerRecord, requests: Iterable[str]) -> None:
        """Shorten the lives of results that their client holds; ids of others are left alone."""
        raise NotImplementedError
