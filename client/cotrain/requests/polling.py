"""Polling for results: long polls of single requests, and batch polls of all samples of a sampler."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cotrain import errors
from cotrain.transport.http import JSON, Transport
from cotrain.transport.responses import acknowledged, read, reader
from cotrain.wire.codec import PROTOBUF, decode_pass_output, decode_sample_response
from cotrain.wire.datums import ForwardBackwardOutput
from cotrain.wire.runs import FutureRetrieveRequest, RequestFailedResponse, UntypedAPIFuture
from cotrain.wire.sampling import (
    MAX_RETRIEVED,
    CancelFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    SampleRequest,
    SampleResponse,
    SamplingSessionTarget,
)

T = TypeVar("T")
Result = TypeVar("Result", bound=BaseModel)

PENDING = 408
"""Status that the server sends at the end of a long poll while the result is pending."""
# Message of the server for a request that loads a missing checkpoint. The server sends no code for it,
# so a test compares the two texts.
NOT_FOUND = "Checkpoint not found."
# A poll is a long poll. If one is answered at once, this pause keeps the loop from spinning.
GAP_S = 0.05


async def wait_for_pass(transport: Transport, request_id: str) -> ForwardBackwardOutput:
    """Wait for the result of a forward or forward_backward. Raises RequestFailed or APIError."""
    return await _wait(transport, request_id, ForwardBackwardOutput, decode_pass_output)


async def wait_for_sample(transport: Transport, request_id: str) -> SampleResponse:
    """Wait for the result of a sample request. Raises RequestFailed or APIError."""
    return await _wait(transport, request_id, SampleResponse, decode_sample_response)


async def wait_for_json(transport: Transport, request_id: str, result: type[Result]) -> Result:
    """Wait for a result that is JSON of this shape. Raises RequestFailed or APIError."""
    return await _wait(transport, request_id, result)


async def _wait(
    transport: Transport, request_id: str, result: type[Result], decode: Callable[[bytes], Result] | None = None
) -> Result:
    def checked(response: httpx.Response) -> Result:
        _raise_failure(response, request_id)
        if decode and _is_binary(response):
            return decode(response.content)
        return read(response, result)

    request = FutureRetrieveRequest(request_id=request_id)
    patience = transport.patience()
    while True:
        try:
            return await transport.post_once("retrieve_future", request, checked, accept=f"{PROTOBUF}, {JSON}")
        # The result itself; CheckpointNotFound is an APIStatusError as well.
        except errors.RequestFailed:
            raise
        except errors.APIStatusError as error:
            if not isinstance(error.body, dict) and transport.is_known:
                # Not a rejection by the server, which sends JSON. Repeating the poll is harmless.
                await patience.wait_out(errors.ForeignAnswer(str(error)))
            elif error.status_code == PENDING:
                patience.pending(error)
                await transport.sleep(GAP_S)
            else:
                await patience.wait_out(error)
        except errors.APIError as error:
            await patience.wait_out(error)


def _is_binary(response: httpx.Response) -> bool:
    return response.is_success and response.headers.get("Content-Type", "").startswith(PROTOBUF)


def _raise_failure(response: httpx.Response, request_id: str) -> None:
    if _is_binary(response) or not response.is_success:
        return
    answer = _json_object(response)
    if not {"error", "category"} <= answer.keys():
        return
    try:
        failure = RequestFailedResponse.model_validate(answer)
    except ValidationError:
        raise errors.RequestFailed(str(answer["error"]), request_id, "unknown") from None
    if failure.error == NOT_FOUND:
        raise errors.CheckpointNotFound(failure.error, request_id)
    raise errors.RequestFailed(failure.error, request_id, failure.category)


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise errors.MalformedMessage("retrieve_future did not answer JSON") from error
    if not isinstance(answer, dict):
        raise errors.MalformedMessage("retrieve_future did not answer a JSON object")
    return answer


log = logging.getLogger("cotrain")


class Completions:
    """Completed requests of one sampler. Runs on the client's own loop.

    It decides when to fetch a result, and never contains one. If batch polling fails, each request is
    polled separately, and only the server's response to that poll counts.
    """

    def __init__(self, transport: Transport, target: SamplingSessionTarget) -> None:
        self._transport = transport
        self._target = target
        self._waiting: dict[str, asyncio.Event] = {}
        self._ended: set[str] = set()
        """Requests that ended before a caller waited for them."""
        self._retrieved: set[str] = set()
        """Results that have arrived and are not yet acknowledged to the server."""
        self._cursor = 0
        self._failed = False
        self.task: asyncio.Task[None] | None = None
        """Polls while a result is awaited, or has arrived and is not acknowledged."""

    async def ended(self, request_id: str) -> None:
        """Wait until a request has ended, or has to be polled separately."""
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
        """Record that a result has arrived; the next poll acknowledges it, so that the server can drop it."""
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
                except errors.APIError as error:
                    await patience.wait_out(error)
        except errors.APIError as error:
            self._fail(error)
        finally:
            self.task = None

    async def _poll_once(self) -> None:
        retrieved = sorted(self._retrieved)[:MAX_RETRIEVED]  # the next poll sends the remainder
        request = RetrieveFuturesRequest(
            target=self._target,
            prev_cursor=self._cursor,
            timeout=None if self._waiting else 0.0,
            retrieved_request_ids=retrieved,
        )
        answer = await self._transport.post_once("retrieve_futures", request, reader(RetrieveFuturesResponse))
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

    def _fail(self, error: errors.CotrainError) -> None:
        log.warning("batch polling failed; polling each sample on its own from now on: %s", error)
        self._failed = True
        for waiting in self._waiting.values():
            waiting.set()


POSTS_AT_ONCE = 32
"""Maximum number of rejected samples that retry at once; all others wait."""
POLLS_AT_ONCE = 500
"""Concurrent polls. Each holds a connection; the other half is for training and heartbeats."""
CANCEL_WITHIN_S = 5.0


class SampleRequests:
    """Sample requests of all samplers of one connection."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.limit(POLLS_AT_ONCE)

    def limit(self, samples: int) -> None:
        """Set the number of concurrent requests, from the server's configuration, before the first is sent."""
        self._posts = asyncio.Semaphore(min(samples, POSTS_AT_ONCE))
        self._polls = asyncio.Semaphore(min(samples, POLLS_AT_ONCE))

    async def accept(self, request: SampleRequest) -> UntypedAPIFuture:
        """POST a sample request until the server accepts it, without a time limit while it is busy.

        Every attempt has the same `seq_id`, so repeats have no effect. Raises APIError.
        """
        async with self._posts:
            while True:
                try:
                    return await self._transport.post("asample", request, reader(UntypedAPIFuture))
                except errors.RateLimitError:
                    continue  # the transport has already reported it

    async def retrieve(self, request_id: str) -> SampleResponse:
        """Wait for the result of a sample request. Raises RequestFailed or APIError."""
        async with self._polls:
            return await wait_for_sample(self._transport, request_id)

    async def cancel(self, request_id: str) -> None:
        """Cancel a sample. If the call does not reach the server, the sample still runs."""
        with suppress(errors.APIError, TimeoutError):
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await self._transport.post_once(
                    "cancel_future", CancelFutureRequest(request_id=request_id), acknowledged
                )
