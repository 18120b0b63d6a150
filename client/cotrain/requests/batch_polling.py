"""Batch polling: one poll for all waiting samples of a sampler."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cotrain.errors import APIError
from cotrain.transport.http import reader
from cotrain.wire.sampling import (
    MAX_RETRIEVED,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
)

if TYPE_CHECKING:
    from cotrain.errors import CotrainError
    from cotrain.transport.http import Transport
    from cotrain.wire.sampling import SamplingSessionTarget

log = logging.getLogger("cotrain")

# The server holds a poll for long. Should one answer at once with nothing, this keeps the loop from spinning.
GAP_S = 0.05


class Completions:
    """Knows which requests of one sampler have ended. Lives on the client's own loop.

    It says when to ask for a result, never what the result is: where batch polling fails, each
    request is polled on its own, and the server's answer to that counts.
    """

    def __init__(self, transport: Transport, target: SamplingSessionTarget) -> None:
        self._transport = transport
        self._target = target
        self._waiting: dict[str, asyncio.Event] = {}
        self._ended: set[str] = set()
        """Ended before a caller waited for them."""
        self._retrieved: set[str] = set()
        """Results that have arrived, which the server does not know yet."""
        self._cursor = 0
        self._failed = False
        self.task: asyncio.Task[None] | None = None
        """Polls while a result is awaited, or has arrived and is not acknowledged."""

    async def ended(self, request_id: str) -> None:
        """Wait until a request has ended, or has to be polled on its own."""
        if self._failed or request_id in self._ended:
            self._ended.discard(request_id)
            return
        ended = self._waiting[request_id] = asyncio.Event()
        self._go_on()
        try:
            await ended.wait()
        finally:
            self._waiting.pop(request_id, None)

    def retrieved(self, request_id: str) -> None:
        """Note that a result has arrived, so that the server need not keep it."""
        if not self._failed:
            self._retrieved.add(request_id)
            self._go_on()

    def _go_on(self) -> None:
        if self.task is None:
            self.task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        patience = self._transport.patience()
        try:
            while self._waiting or self._retrieved:
                try:
                    await self._poll_once()
                    patience.renew()
                except APIError as error:
                    await patience.wait_out(error)
        except APIError as error:
            self._fail(error)
        finally:
            self.task = None

    async def _poll_once(self) -> None:
        retrieved = sorted(self._retrieved)[:MAX_RETRIEVED]  # the rest goes with the next poll
        request = RetrieveFuturesRequest(
            target=self._target,
            prev_cursor=self._cursor,
            timeout=None if self._waiting else 0.0,
            retrieved_request_ids=retrieved,
        )
        answer = await self._transport.post_once(
            "retrieve_futures", request, reader(RetrieveFuturesResponse)
        )
        self._retrieved.difference_update(retrieved)
        self._cursor = answer.cursor
        for completion in answer.completions:
            self._note(completion.request_id)
        if self._waiting and not answer.completions:
            await self._transport.sleep(GAP_S)

    def _note(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            self._ended.add(request_id)
        else:
            waiting.set()

    def _fail(self, error: CotrainError) -> None:
        log.warning("batch polling failed; polling each sample on its own from now on: %s", error)
        self._failed = True
        for waiting in self._waiting.values():
            waiting.set()
