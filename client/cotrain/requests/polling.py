"""Waiting for one request's result: the long poll, and what each answer to it means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from cotrain.errors import (
    APIError,
    APIStatusError,
    CheckpointNotFound,
    ForeignAnswer,
    MalformedMessage,
    RequestFailed,
)
from cotrain.transport.http import JSON, Transport, read
from cotrain.wire.futures import FutureRetrieveRequest, RequestFailedResponse
from cotrain.wire.pass_codec import PROTOBUF, decode_pass_output
from cotrain.wire.runs import ForwardBackwardOutput
from cotrain.wire.sample_codec import decode_sample_response
from cotrain.wire.sampling import SampleResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

T = TypeVar("T")
Result = TypeVar("Result", bound=BaseModel)

PENDING = 408
"""The server's answer, as late as it may give it, that a result is not there yet."""
# What the server says where a request was to load what is not there: it sends no code for it, and a
# test compares the two texts.
NOT_FOUND = "Checkpoint not found."
# A poll is a long poll. Should one be answered at once, this keeps the loop from spinning.
GAP_S = 0.05


async def wait_for_pass(transport: Transport, request_id: str) -> ForwardBackwardOutput:
    """Wait for the result of a forward or forward_backward. Raises RequestFailed or APIError."""

    def reads(response: httpx.Response) -> ForwardBackwardOutput:
        if _is_binary(response):
            return decode_pass_output(response.content)
        return read(response, ForwardBackwardOutput)

    return await _wait(transport, request_id, reads)


async def wait_for_sample(transport: Transport, request_id: str) -> SampleResponse:
    """Wait for the result of a sample request. Raises RequestFailed or APIError."""

    def reads(response: httpx.Response) -> SampleResponse:
        if _is_binary(response):
            return decode_sample_response(response.content)
        return read(response, SampleResponse)

    return await _wait(transport, request_id, reads)


async def wait_for_json(transport: Transport, request_id: str, result: type[Result]) -> Result:
    """Wait for a result that is JSON of this shape. Raises RequestFailed or APIError."""
    return await _wait(transport, request_id, lambda response: read(response, result))


async def _wait(transport: Transport, request_id: str, reads: Callable[[httpx.Response], T]) -> T:
    def checked(response: httpx.Response) -> T:
        _raise_failure(response, request_id)
        return reads(response)

    request = FutureRetrieveRequest(request_id=request_id)
    patience = transport.patience()
    while True:
        try:
            return await transport.post_once(
                "retrieve_future", request, checked, accept=f"{PROTOBUF}, {JSON}"
            )
        except APIStatusError as error:
            if not isinstance(error.body, dict) and transport.is_known:
                # No refusal of the server: its own are JSON. To ask again changes nothing.
                await patience.wait_out(ForeignAnswer(str(error)))
            elif error.status_code == PENDING:
                patience.pending(error)
                await transport.sleep(GAP_S)
            else:
                await patience.wait_out(error)
        except APIError as error:
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
        raise RequestFailed(str(answer["error"]), request_id, "unknown") from None
    if failure.error == NOT_FOUND:
        raise CheckpointNotFound(failure.error, request_id)
    raise RequestFailed(failure.error, request_id, failure.category)


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise MalformedMessage("retrieve_future did not answer JSON") from error
    if not isinstance(answer, dict):
        raise MalformedMessage("retrieve_future did not answer a JSON object")
    return answer
