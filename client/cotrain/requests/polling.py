"""Waiting for one request's result: the long poll, and what each answer to it means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cotrain.errors import (
    APIError,
    APIStatusError,
    CheckpointNotFound,
    MalformedMessage,
    RequestFailed,
)
from cotrain.transport.http import JSON, Transport
from cotrain.wire.futures import FutureRetrieveRequest, RequestFailedResponse
from cotrain.wire.pass_codec import PROTOBUF, decode_pass_output
from cotrain.wire.runs import ForwardBackwardOutput
from cotrain.wire.sample_codec import decode_sample_response
from cotrain.wire.sampling import SampleResponse

if TYPE_CHECKING:
    import httpx

PENDING = 408
"""The server's answer, as late as it may give it, that a result is not there yet."""
# What the server says where a request was to load what is not there: it sends no code for it, and a
# test compares the two texts.
NOT_FOUND = "Checkpoint not found."
# A poll is a long poll. Should one be answered at once, this keeps the loop from spinning.
GAP_S = 0.05


async def wait_for_pass(transport: Transport, request_id: str) -> ForwardBackwardOutput:
    """Wait for the result of a forward or forward_backward. Raises RequestFailed or APIError."""
    response = await _wait(transport, request_id)
    if response.headers.get("Content-Type", "").startswith(PROTOBUF):
        return decode_pass_output(response.content)
    return ForwardBackwardOutput.model_validate_json(response.content)


async def wait_for_sample(transport: Transport, request_id: str) -> SampleResponse:
    """Wait for the result of a sample request. Raises RequestFailed or APIError."""
    response = await _wait(transport, request_id)
    if response.headers.get("Content-Type", "").startswith(PROTOBUF):
        return decode_sample_response(response.content)
    return SampleResponse.model_validate_json(response.content)


async def wait_for_json(transport: Transport, request_id: str) -> dict[str, Any]:
    """Wait for a result that is a JSON object. Raises RequestFailed or APIError."""
    return _json_object(await _wait(transport, request_id))


async def _wait(transport: Transport, request_id: str) -> httpx.Response:
    request = FutureRetrieveRequest(request_id=request_id)
    patience = transport.patience()
    while True:
        try:
            response = await transport.post_once(
                "retrieve_future", request, accept=f"{PROTOBUF}, {JSON}"
            )
        except APIError as error:
            if isinstance(error, APIStatusError) and error.status_code == PENDING:
                patience.pending(error)
                await transport.sleep(GAP_S)
            else:
                await patience.wait_out(error)
        else:
            _raise_failure(response, request_id)
            return response


def _raise_failure(response: httpx.Response, request_id: str) -> None:
    if response.headers.get("Content-Type", "").startswith(PROTOBUF):
        return
    answer = _json_object(response)
    if "error" not in answer:
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
