"""Polls for the results of accepted requests."""

import json
from collections.abc import Callable
from typing import TypeVar, get_args

import httpx
from pydantic import BaseModel

from cotrain.errors import (
    APIError,
    APIStatusError,
    Category,
    CheckpointNotFound,
    ForeignAnswer,
    MalformedMessage,
    RequestFailed,
)
from cotrain.transport.http import JSON, Transport
from cotrain.transport.responses import read, reader
from cotrain.wire.codec import PROTOBUF, decode_pass_output
from cotrain.wire.datums import ForwardBackwardOutput
from cotrain.wire.runs import FutureRetrieveRequest, UntypedAPIFuture

Result = TypeVar("Result", bound=BaseModel)

_PENDING = 408
"""Status that the server sends at the end of a long poll while the result is pending."""
# Message of the server for a request that loads a missing checkpoint. The server sends no code for it,
# so a test compares the two texts.
NOT_FOUND = "Checkpoint not found."
# A poll is a long poll. If one is answered at once, this pause keeps the loop from spinning.
GAP_S = 0.05


async def post_and_wait(transport: Transport, path: str, request: BaseModel, result: type[Result]) -> Result:
    """POST a request that the server queues, and wait for its result. Raises RequestFailed or APIError."""
    future = await transport.post(path, request, reader(UntypedAPIFuture))
    return await wait_for_result(transport, future.request_id, result)


async def wait_for_pass(transport: Transport, request_id: str) -> ForwardBackwardOutput:
    """Wait for the result of a forward or forward_backward. Raises RequestFailed or APIError."""
    return await wait_for_result(transport, request_id, ForwardBackwardOutput, decode_pass_output)


async def wait_for_result(
    transport: Transport, request_id: str, result: type[Result], decode: Callable[[bytes], Result] | None = None
) -> Result:
    """Wait for a result: JSON of this shape, or bytes for `decode`. Raises RequestFailed or APIError."""

    def parsed(response: httpx.Response) -> Result:
        _raise_failure(response, request_id)
        if decode and _is_binary(response):
            return decode(response.content)
        return read(response, result)

    request = FutureRetrieveRequest(request_id=request_id)
    patience = transport.patience()
    while True:
        try:
            return await transport.post_once("retrieve_future", request, parsed, accept=f"{PROTOBUF}, {JSON}")
        except RequestFailed:  # first, because CheckpointNotFound is an APIStatusError as well
            raise
        except APIStatusError as error:
            if not isinstance(error.body, dict) and transport.is_known:
                # Not a rejection by the server, which sends JSON. Repeating the poll is harmless.
                await patience.wait_out(ForeignAnswer(str(error)))
            elif error.status_code == _PENDING:
                patience.pending(error)
                await transport.sleep(GAP_S)
            else:
                await patience.wait_out(error)
        except APIError as error:
            await patience.wait_out(error)


def _is_binary(response: httpx.Response) -> bool:
    return response.is_success and response.headers.get("Content-Type", "").startswith(PROTOBUF)


def _raise_failure(response: httpx.Response, request_id: str) -> None:
    """Raise RequestFailed if a successful response reports the failure of the request."""
    if _is_binary(response) or not response.is_success:
        return
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise MalformedMessage("retrieve_future did not answer JSON") from error
    if not isinstance(answer, dict):
        raise MalformedMessage("retrieve_future did not answer a JSON object")
    if not {"error", "category"} <= answer.keys():
        return
    message, category = str(answer["error"]), answer["category"]
    if message == NOT_FOUND:
        raise CheckpointNotFound(message, request_id)
    raise RequestFailed(message, request_id, category if category in get_args(Category) else "unknown")
