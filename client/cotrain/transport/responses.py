"""Parsing of HTTP responses: messages of the protocol, rejections, and responses of intermediaries."""

from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cotrain import errors

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

LONGEST_DETAIL = 1_000
LONGEST_EXCERPT = 80
LONGEST_ID = 64
NO_CONTENT, BAD_REQUEST, UNAUTHORIZED, TOO_LARGE = 204, 400, 401, 413
UNBELIEVED = "CERTIFICATE_VERIFY_FAILED"
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL errors, of older and newer versions, for a response in plain text."""


def read(response: httpx.Response, model: type[Model]) -> Model:
    """Parse a JSON response.

    Raises MalformedMessage if it does not match the model, or has fields but none of the model's.
    """
    failure = errors.MalformedMessage(f"{response.url} did not answer a {model.__name__}")
    if not response.is_success or is_page(response):
        raise failure
    try:
        answer = model.model_validate_json(response.content)
    except ValidationError as error:
        raise failure from error
    if not answer.model_fields_set and response.content.strip() != b"{}":
        raise failure
    return answer


def reader(model: type[Model]) -> Callable[[httpx.Response], Model]:
    """Return a function that parses responses with this model."""
    return lambda response: read(response, model)


def acknowledged(response: httpx.Response) -> None:
    """Check that a response has no content. Raises MalformedMessage if it has."""
    is_empty = response.status_code == NO_CONTENT
    if not is_empty and (not response.is_success or _json_or_text(response) not in ({}, None)):
        raise errors.MalformedMessage(f"{response.url} did not answer that it is done")


def understood(response: httpx.Response, reads: Callable[[httpx.Response], T], *, is_known: bool = False) -> T:
    """Parse a response; `is_known` if this server has responded before.

    If `reads` raises MalformedMessage, raises ForeignAnswer with a hint at the cause.
    """
    try:
        return reads(response)
    except errors.MalformedMessage as error:
        hint = _hint(response, is_known=is_known) or _excerpt(response)
        raise errors.ForeignAnswer(f"{error}{hint}") from error


def refusal(response: httpx.Response, *, is_known: bool = False) -> errors.APIStatusError:
    """Return the error for a rejection; `is_known` if this server has responded before."""
    detail = body = _json_or_text(response)
    for name in ("detail", "error", "message"):  # endpoints for text use the formats of other APIs
        detail = detail.get(name, detail) if isinstance(detail, dict) else detail
    if is_page(response):  # of a proxy or another kind of server, and useless to a caller
        detail = ""
    message = str(detail or response.reason_phrase)[:LONGEST_DETAIL]
    hint = "" if response.is_server_error else _hint(response, is_known=is_known)
    if response.status_code == TOO_LARGE and not isinstance(body, dict):
        hint = (
            "; a proxy before the server takes no request of this size: raise its limit (nginx: client_max_body_size)"
        )
    return errors.status_error(
        response.status_code,
        message.removesuffix(".") + hint if hint else message,
        body,
        _seconds(response.headers.get("Retry-After")),
        response.headers.get("X-Request-Id", "")[:LONGEST_ID],
    )


def unreached(
    error: httpx.TransportError, url: httpx.URL, through: str = "", *, is_known: bool = False
) -> errors.CotrainError:
    """Return the error for a missing response, `through` a proxy; `is_known` if this server has responded before.

    A server that never responded may use plain HTTP instead of TLS, or an untrusted certificate.
    Waiting does not help then, so the error is SettingsMissing.
    """
    message = f"cannot reach {url}{through}: {error}"
    if UNBELIEVED in str(error):
        message += (
            ". Where a certificate authority of your own signs it, SSL_CERT_FILE names the file of its certificate"
        )
        return errors.APIConnectionError(message) if is_known else errors.SettingsMissing(message)
    if isinstance(error, httpx.TimeoutException):
        return errors.APITimeoutError(f"{url}{through} did not answer in time")
    if is_known:
        return errors.APIConnectionError(message)
    if url.scheme == "https" and any(sign in str(error) for sign in NO_TLS):
        return errors.SettingsMissing(f"{_origin(url)} does not speak https: try http://{_host(url)}")
    if url.scheme == "http" and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return errors.APIConnectionError(f"{message} If it speaks https, try https://{_host(url)}")
    return errors.APIConnectionError(message)


def _hint(response: httpx.Response, *, is_known: bool) -> str:
    """Return a hint at the cause: the key, a proxy, or the address if no such server has responded yet."""
    if target := response.headers.get("Location"):
        if is_known:
            return f"; something before the server redirects to {target}: a login?"
        return f"; it redirects to {target}: is that the base URL?"
    is_400 = response.status_code == BAD_REQUEST
    if is_400 and response.url.scheme == "http" and "HTTPS" in response.text[:LONGEST_DETAIL]:
        return f"; try https://{_host(response.url)}"
    if is_page(response) and is_known:
        return "; a web page came back: a proxy before the server answered in its place"
    if is_page(response):
        origin = _origin(response.url)
        return f"; a web page came back, so {origin} is no cotrain server: is the base URL right?"
    if response.status_code == UNAUTHORIZED:
        return "; is the key right? (`api_key=`, or COTRAIN_API_KEY)"
    return ""


def _origin(url: httpx.URL) -> str:
    return f"{url.scheme}://{_host(url)}"


def _host(url: httpx.URL) -> str:
    return url.netloc.decode()


def is_page(response: httpx.Response) -> bool:
    """Return True if a response is a web page, which the protocol never sends."""
    return "text/html" in response.headers.get("Content-Type", "")


def _excerpt(response: httpx.Response) -> str:
    text = " ".join(response.text[:LONGEST_DETAIL].split())[:LONGEST_EXCERPT]
    return f": {text}" if text.isprintable() and text else ""


def _json_or_text(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None  # missing, or an HTTP date, which this server does not send
    return seconds if 0 < seconds <= 60 else None
