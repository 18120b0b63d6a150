"""What an HTTP answer says: a message of the wire, a refusal, or that it came from another server."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cotrain.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    CotrainError,
    MalformedMessage,
    SettingsMissing,
    status_error,
)

Model = TypeVar("Model", bound=BaseModel)

LONGEST_DETAIL = 1_000
LONGEST_ID = 64
BAD_REQUEST, UNAUTHORIZED = 400, 401
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""What OpenSSL, older and newer, says of an answer that is plain text."""


def read(response: httpx.Response, model: type[Model]) -> Model:
    """Read a JSON answer. Raises MalformedMessage where it is not of this shape."""
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        message = f"{response.url} did not answer a {model.__name__}"
        raise MalformedMessage(message + _hint(response)) from error


def refusal(response: httpx.Response) -> APIStatusError:
    """Make an error of an answer that says no."""
    detail = body = _json_or_text(response)
    for name in ("detail", "error", "message"):  # the endpoints for text answer in others' dialects
        detail = detail.get(name, detail) if isinstance(detail, dict) else detail
    if _is_page(response):  # of a proxy or another kind of server, and of no use to a caller
        detail = ""
    message = str(detail or response.reason_phrase)[:LONGEST_DETAIL]
    hint = "" if response.is_server_error else _hint(response)
    return status_error(
        response.status_code,
        message.removesuffix(".") + hint if hint else message,
        body,
        _seconds(response.headers.get("Retry-After")),
        response.headers.get("X-Request-Id", "")[:LONGEST_ID],
    )


def unreached(
    error: httpx.TransportError, url: httpx.URL, *, is_known: bool = False
) -> CotrainError:
    """Make an error of no answer; `is_known` where this server has answered before.

    One that has not, and sounds as if it spoke plain HTTP where TLS was tried, is no matter of waiting:
    SettingsMissing.
    """
    message = f"cannot reach {url}: {error}"
    if isinstance(error, httpx.TimeoutException):
        return APITimeoutError(f"{url} did not answer in time")
    if is_known:
        return APIConnectionError(message)
    if url.scheme == "https" and any(sign in str(error) for sign in NO_TLS):
        return SettingsMissing(f"{_origin(url)} does not speak https: try http://{_host(url)}")
    if url.scheme == "http" and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return APIConnectionError(f"{message} If it speaks https, try https://{_host(url)}")
    return APIConnectionError(message)


def _hint(response: httpx.Response) -> str:
    """Say what to look at: the key, or the address where no server of this protocol answers like this."""
    if target := response.headers.get("Location"):
        return f"; it redirects to {target}: is that the base URL?"
    is_400 = response.status_code == BAD_REQUEST
    if is_400 and response.url.scheme == "http" and "HTTPS" in response.text[:LONGEST_DETAIL]:
        return f"; try https://{_host(response.url)}"
    if _is_page(response):
        origin = _origin(response.url)
        return f"; a web page came back, so {origin} is no cotrain server: is the base URL right?"
    if response.status_code == UNAUTHORIZED:
        return "; is the key right? (`api_key=`, or COTRAIN_API_KEY)"
    return ""


def _origin(url: httpx.URL) -> str:
    return f"{url.scheme}://{_host(url)}"


def _host(url: httpx.URL) -> str:
    return url.netloc.decode()


def _is_page(response: httpx.Response) -> bool:
    return "text/html" in response.headers.get("Content-Type", "")


def _json_or_text(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None  # absent, or an HTTP date, which this server does not send
    return seconds if 0 < seconds <= 60 else None
