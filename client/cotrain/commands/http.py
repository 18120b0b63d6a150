"""Calls of what is no part of the training protocol: the server's status, and its endpoints for text.

They need no session, no thread and no retries, and the status may be asked for without a key.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from cotrain.errors import APIConnectionError, MalformedMessage
from cotrain.transport.environment import proxy_of, through_proxy, trusted
from cotrain.transport.responses import is_page, refusal, understood, unreached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cotrain.settings import ClientSettings

# A sample waits for its turn, which may take minutes on a busy server.
TIMEOUT = httpx.Timeout(10.0, read=600.0)
ADMIN_KEY_FILE = "admin-key"
#: Where `cotrain serve` keeps everything by default.
DEFAULT_DATA_DIR = Path.home() / ".cotrain"
#: A key of this host is shown to no other.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@contextmanager
def plain_http(settings: ClientSettings) -> Iterator[httpx.Client]:
    """Open a client; without a key it shows none. Raises APIConnectionError from within the block."""
    headers = {"X-API-Key": settings.api_key} if settings.api_key else {}
    try:
        with httpx.Client(
            base_url=settings.base_url,
            headers=headers,
            timeout=TIMEOUT,
            verify=trusted(),
            proxy=proxy_of(settings.base_url),
            trust_env=False,
        ) as client:
            yield client
    except httpx.TransportError as error:
        through = through_proxy(settings.base_url)
        raise unreached(error, httpx.URL(settings.base_url), through) from error
    except httpx.InvalidURL as error:
        raise APIConnectionError(f"cannot reach {settings.base_url}: {error}") from error


def checked(response: httpx.Response) -> httpx.Response:
    """Give an answer back that is one.

    Raises APIStatusError for a refusal, and ForeignAnswer for a redirect or a web page.
    """
    if response.is_success and not is_page(response):
        return response
    response.read()
    if response.is_error:
        raise refusal(response)
    return understood(response, _foreign)


def _foreign(response: httpx.Response) -> httpx.Response:
    raise MalformedMessage(f"{response.url} did not answer as a cotrain server does")


def kept_admin_key(url: str, data_dir: Path) -> str:
    """Read the operator's key of a server on this host; empty where this user cannot, or it is elsewhere."""
    if urlsplit(url).hostname not in LOOPBACK:
        return ""
    try:
        return (data_dir / ADMIN_KEY_FILE).read_text().strip()
    except OSError:
        return ""
