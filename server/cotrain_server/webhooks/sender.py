"""One delivery attempt of an event: a single signed POST to an allowed address.

The signature follows standardwebhooks.com, so its libraries can verify it. Redirects and proxies
are not used. Only the status of the answer matters, and at most 16 KB of its body are read.
"""

import asyncio
import hashlib
import hmac
import ssl
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from functools import cached_property
from ipaddress import ip_network

import httpcore

from cotrain.version import __version__
from cotrain_server.webhooks.addresses import AddressRefused, CheckedNetwork, NameUnknown
from cotrain_store.messages.webhooks import DueEvent
from cotrain_store.tenants.webhooks import SECRET_PREFIX

#: Time limit of a whole attempt in seconds, including name lookup and reading the answer.
TIMEOUT_S = 10.0
MAX_READ = 16 * 1024


#: Errors of an attempt without an answer.
_FAILURES = (
    httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError, ValueError,
)  # fmt: skip


class Undelivered(Exception):
    """An attempt failed; its text is shown to the tenant."""


def signature(secret: str, event_id: str, timestamp: int, body: bytes) -> str:
    """Return the signature: base64 of HMAC-SHA256 over `<id>.<timestamp>.<body>`, with a version prefix."""
    key = b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


class Sender:
    """Sender of events of one process."""

    def __init__(self, networks: Iterable[str], tls: ssl.SSLContext | None = None) -> None:
        self._network = CheckedNetwork([ip_network(each) for each in networks])
        self._given_tls = tls

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """TLS context, created for the first event: loading the host's trust store takes longer
        than the rest of a start.
        """
        return self._given_tls or ssl.create_default_context()

    def close(self) -> None:
        """Close the network. No further events can be sent."""
        self._network.close()

    async def send(self, event: DueEvent, timestamp: int) -> str:
        """Send an event and return the status. Raises Undelivered for any status except 2xx."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await self._post(event, timestamp)
        except TimeoutError:
            raise Undelivered(f"no answer within {TIMEOUT_S:.0f} s") from None
        except (AddressRefused, *_FAILURES) as failed:
            raise Undelivered(failure_of(failed)) from failed
        if not 200 <= status < 300:
            raise Undelivered(f"answered with status {status}")
        return str(status)

    async def _post(self, event: DueEvent, timestamp: int) -> int:
        headers: dict[bytes | str, bytes | str] = {
            "Content-Type": "application/json",
            "User-Agent": f"cotrain/{__version__}",
            "webhook-id": event.id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(event.secret, event.id, timestamp, event.body),
        }
        network = self._network.of(encrypted=event.url.startswith("https:"))
        async with (
            httpcore.AsyncConnectionPool(self._tls, network_backend=network) as pool,
            pool.stream("POST", event.url, headers=headers, content=event.body) as answer,
        ):
            read = 0
            async for part in answer.aiter_stream():
                read += len(part)
                if read > MAX_READ:
                    break
            return answer.status


def failure_of(failed: Exception) -> str:
    """Return the kind of a failure for the tenant. It contains no byte from the receiver."""
    if isinstance(failed, AddressRefused | NameUnknown):
        return str(failed)[:200]
    causes = list(_causes(failed))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return "the receiver's TLS certificate is not valid for its name, or not trusted here"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "no TLS connection could be made"
    if isinstance(failed, httpcore.TimeoutException):
        return f"no answer within {TIMEOUT_S:.0f} s"
    if isinstance(failed, httpcore.ConnectError):
        return "no connection could be made"
    if isinstance(failed, httpcore.ProtocolError):
        return "the answer is not HTTP"
    if isinstance(failed, httpcore.NetworkError | OSError):
        return "the connection broke"
    return "the request could not be sent"


def _causes(failed: BaseException | None) -> Iterator[BaseException]:
    while failed is not None:
        yield failed
        failed = failed.__cause__ or failed.__context__
