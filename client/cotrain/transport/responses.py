"""Responses of a server, parsed or turned into errors, and the retries after a failure.

Calls are retried after a lost response, and while the server is busy (429), restarting (5xx) or slow (408). Every
other rejection is raised to the caller. A response from an intermediary counts as a lost response, but only if the
server has responded before; otherwise the address is wrong. A server that has responded before gets minutes to
come back. One that never has is probably at another address, and gets seconds.
"""

import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cotrain.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    CotrainError,
    ForeignAnswer,
    MalformedMessage,
    SettingsMissing,
    status_error,
)
from cotrain.transport.progress import PROGRESS

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

log = logging.getLogger("cotrain")

# Maximum characters of a server's texts in an error.
_LONGEST_DETAIL = 1_000
_LONGEST_EXCERPT = 80
_LONGEST_ID = 64
_NO_CONTENT, _BAD_REQUEST, _UNAUTHORIZED, _TOO_LARGE = 204, 400, 401, 413
#: Code of the server's answer for a path without an endpoint. An unknown run or checkpoint has another one.
_UNKNOWN_PATH = "not_found"
_UNTRUSTED_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""OpenSSL errors, of older and newer versions, for a response in plain text."""

WARN_AFTER_S = 10.0
WARN_AGAIN_S = 600.0
"""Minimum interval between two log lines with the same reason."""
MESSAGE_SHOWN_S = 60.0
"""Display time of a server message: the longest time until a poll brings the next one."""


# ---- Parsing --------------------------------------------------------------------------------------


def read(response: httpx.Response, model: type[Model]) -> Model:
    """Parse a JSON response.

    Raises MalformedMessage if it does not match the model, or has fields but none of the model's.
    """
    failure = MalformedMessage(f"{response.url} did not answer a {model.__name__}")
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
    is_empty = response.status_code == _NO_CONTENT
    if not is_empty and (not response.is_success or _json_or_text(response) not in ({}, None)):
        raise MalformedMessage(f"{response.url} did not answer that it is done")


def parsed(response: httpx.Response, reads: Callable[[httpx.Response], T], *, is_known: bool = False) -> T:
    """Parse a response; `is_known` if this server has responded before.

    If `reads` raises MalformedMessage, raises ForeignAnswer with a hint at the cause.
    """
    try:
        return reads(response)
    except MalformedMessage as error:
        hint = _hint(response, is_known=is_known) or _excerpt(response)
        raise ForeignAnswer(f"{error}{hint}") from error


def refusal(response: httpx.Response, *, is_known: bool = False) -> APIStatusError:
    """Return the error for a rejection; `is_known` if this server has responded before."""
    detail = body = _json_or_text(response)
    for name in ("detail", "error", "message"):  # endpoints for text use the formats of other APIs
        detail = detail.get(name, detail) if isinstance(detail, dict) else detail
    if is_page(response):  # of a proxy or another kind of server, and useless to a caller
        detail = ""
    message = str(detail or response.reason_phrase)[:_LONGEST_DETAIL]
    hint = "" if response.is_server_error else _hint(response, is_known=is_known)
    if response.status_code == _TOO_LARGE and not isinstance(body, dict):
        hint = (
            "; a proxy before the server takes no request of this size: raise its limit (nginx: client_max_body_size)"
        )
    return status_error(
        response.status_code,
        message.removesuffix(".") + hint if hint else message,
        body,
        _retry_after_s(response.headers.get("Retry-After")),
        response.headers.get("X-Request-Id", "")[:_LONGEST_ID],
    )


def connection_error(
    error: httpx.TransportError, url: httpx.URL, through: str = "", *, is_known: bool = False
) -> CotrainError:
    """Return the error for a missing response, `through` a proxy; `is_known` if this server has responded before.

    A server that never responded may use plain HTTP instead of TLS, or an untrusted certificate.
    Waiting does not help then, so the error is SettingsMissing.
    """
    message = f"cannot reach {url}{through}: {error}"
    if _UNTRUSTED_CERTIFICATE in str(error):
        message += (
            ". Where a certificate authority of your own signs it, SSL_CERT_FILE names the file of its certificate"
        )
        return APIConnectionError(message) if is_known else SettingsMissing(message)
    if isinstance(error, httpx.TimeoutException):
        return APITimeoutError(f"{url}{through} did not answer in time")
    if is_known:
        return APIConnectionError(message)
    if url.scheme == "https" and any(sign in str(error) for sign in _NO_TLS):
        return SettingsMissing(f"{_origin(url)} does not speak https: try http://{_host(url)}")
    if url.scheme == "http" and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return APIConnectionError(f"{message} If it speaks https, try https://{_host(url)}")
    return APIConnectionError(message)


def is_page(response: httpx.Response) -> bool:
    """Return True if a response is a web page, which the protocol never sends."""
    return "text/html" in response.headers.get("Content-Type", "")


def _hint(response: httpx.Response, *, is_known: bool) -> str:
    """Return a hint at the cause: the key, a proxy, or the address if no server has responded there; "" without one."""
    if target := response.headers.get("Location"):
        if is_known:
            return f"; something before the server redirects to {target}: a login?"
        return f"; it redirects to {target}: is that the base URL?"
    is_400 = response.status_code == _BAD_REQUEST
    if is_400 and response.url.scheme == "http" and "HTTPS" in response.text[:_LONGEST_DETAIL]:
        return f"; try https://{_host(response.url)}"
    if is_page(response) and is_known:
        return "; a web page came back: a proxy before the server answered in its place"
    if is_page(response):
        origin = _origin(response.url)
        return f"; a web page came back, so {origin} is no cotrain server: is the base URL right?"
    if _code(response) == _UNKNOWN_PATH:
        return f"; the server has no path {response.url.path}: is the base URL right?"
    if response.status_code == _UNAUTHORIZED:
        body = _json_or_text(response)
        if isinstance(body, dict) and body.get("code") == "expired_key":
            return "; the operator can create another one"
        return "; is the key right? (`api_key=`, or COTRAIN_API_KEY)"
    return ""


def _code(response: httpx.Response) -> str:
    body = _json_or_text(response)
    return str(body.get("code")) if isinstance(body, dict) else ""


def _origin(url: httpx.URL) -> str:
    return f"{url.scheme}://{_host(url)}"


def _host(url: httpx.URL) -> str:
    return url.netloc.decode()


def _excerpt(response: httpx.Response) -> str:
    text = " ".join(response.text[:_LONGEST_DETAIL].split())[:_LONGEST_EXCERPT]
    return f": {text}" if text.isprintable() and text else ""


def _json_or_text(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _retry_after_s(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None  # missing, or an HTTP date, which this server does not send
    return seconds if 0 < seconds <= 60 else None


# ---- Retries --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetryPolicy:
    """Duration and delays of the retries of a call."""

    give_up_after_s: float = 300.0
    give_up_unanswered_after_s: float = 30.0
    """Limit for a server that has never responded."""
    first_delay_s: float = 0.5
    longest_delay_s: float = 10.0

    def delay_s(self, failures: int, error: APIError, jitter: float) -> float:
        """Return the delay in seconds after `failures` in a row; the server's `Retry-After` takes precedence.

        `jitter` in 0…1 shortens the wait by up to a quarter, so that many clients spread out.
        """
        if isinstance(error, APIStatusError) and error.retry_after_s is not None:
            return error.retry_after_s
        doubled = self.first_delay_s * 2.0 ** min(failures - 1, 30)
        return min(doubled, self.longest_delay_s) * (1.0 - 0.25 * jitter)


@dataclass
class Contact:
    """Reachability of the server, from all calls of one client."""

    base_url: str
    is_known: bool = False
    """True if it has ever responded."""
    _silent_since: float | None = None
    _has_warned: bool = False
    _warned_at: dict[object, float] = field(default_factory=dict)

    def answered(self) -> None:
        """Record a response, whatever its content."""
        if self._silent_since is not None and self._has_warned:
            silence_s = time.monotonic() - self._silent_since
            log.info("%s answers again, after %.0f s", self.base_url, silence_s)
        self.is_known, self._silent_since, self._has_warned = True, None, False

    def lost(self, error: APIConnectionError, patience_s: float) -> None:
        """Record a missing response; warn once each time the server stops responding."""
        self._silent_since = self._silent_since or time.monotonic()
        PROGRESS.show_message(str(error), MESSAGE_SHOWN_S)
        if not self._has_warned and time.monotonic() - self._silent_since >= WARN_AFTER_S:
            self._has_warned = True
            PROGRESS.clear()
            log.warning("still trying, for %.0f s in all: %s", patience_s, error)

    def busy(self, error: APIStatusError, waited_s: float) -> None:
        """Record why the server delays a call; warn once if the wait is long."""
        why = queue_state_reason(error)
        PROGRESS.show_message(why or str(error), MESSAGE_SHOWN_S)
        # The message contains numbers that change: a position, seconds.
        about = re.sub(r"\d+", "", why) if why else error.status_code
        now = time.monotonic()
        if waited_s >= WARN_AFTER_S and now - self._warned_at.get(about, -WARN_AGAIN_S) >= WARN_AGAIN_S:
            self._warned_at[about] = now
            PROGRESS.clear()
            log.warning("still waiting, and trying again: %s", why or error)


@dataclass
class Patience:
    """Remaining retries of one call. Each failure in a row waits longer than the last."""

    policy: RetryPolicy
    contact: Contact
    sleep: Callable[[float], Awaitable[None]]
    _failures: int = 0
    _since: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)

    def renew(self) -> None:
        """Reset the retries: the server has responded usefully."""
        self._failures, self._since = 0, time.monotonic()

    def pending(self, error: APIStatusError) -> None:
        """Reset the retries: the result is pending, and the server may have sent a reason.

        A position in a queue that moves is shown in the progress line. A queue that does not move is
        logged as a warning.
        """
        self.renew()
        reason = queue_state_reason(error)
        if reason and _is_moving(error):
            PROGRESS.show_message(reason, MESSAGE_SHOWN_S)
        elif reason:
            self.contact.busy(error, time.monotonic() - self._began)

    async def wait_out(self, error: APIError) -> None:
        """Wait before the next attempt. Raises the error if it is final or the time limit has passed."""
        self._failures += 1
        tried_s = time.monotonic() - self._since
        if isinstance(error, APIConnectionError):
            self.contact.lost(error, self._limit_s(error))
        if not is_transient(error) or (isinstance(error, ForeignAnswer) and not self.contact.is_known):
            raise error
        if tried_s > self._limit_s(error):
            raise self._final(error, tried_s)
        if isinstance(error, APIStatusError):
            self.contact.busy(error, tried_s)
        await self.sleep(self.policy.delay_s(self._failures, error, random.random()))  # noqa: S311  # no secret

    def _limit_s(self, error: APIError) -> float:
        if isinstance(error, APIConnectionError) and not self.contact.is_known:
            return min(self.policy.give_up_after_s, self.policy.give_up_unanswered_after_s)
        return self.policy.give_up_after_s

    def _final(self, error: APIError, tried_s: float) -> APIError:
        """Return the error to raise after the last attempt; for a missing response, with the number of attempts."""
        if not isinstance(error, APIConnectionError):
            return error
        times = "once" if self._failures == 1 else f"{self._failures} times in {tried_s:.0f} s"
        hint = "" if self.contact.is_known else (
            f". Nothing has ever answered at {self.contact.base_url}: is a server running there,"
            " and is the base URL right?"
        )  # fmt: skip
        final = type(error)(f"{error} (tried {times}){hint}")
        final.__cause__ = error
        return final


def is_transient(error: APIError) -> bool:
    """Return True if the same request may succeed later."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError)


def queue_state_reason(error: APIStatusError) -> str | None:
    """Return the server's reason why a request is still pending, or None."""
    reason = error.body.get("queue_state_reason") if isinstance(error.body, dict) else None
    return str(reason) if reason else None


def _is_moving(error: APIStatusError) -> bool:
    """Return True if the server reports that the request's queue is progressing."""
    return isinstance(error.body, dict) and error.body.get("queue_state") == "active"
