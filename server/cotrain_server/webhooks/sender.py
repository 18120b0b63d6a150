"""One delivery attempt of an event: a single signed POST to an allowed address.

The signature follows standardwebhooks.com, so its libraries can verify it. Redirects and proxies
are not used. Only the status of the answer matters, and at most 16 KB of its body are read.

Allowed are public addresses, and networks that the operator configured. An address is checked when it is connected to,
so a name cannot resolve to another address after the check.
"""

import asyncio
import hashlib
import hmac
import ssl
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import SOCK_STREAM, getaddrinfo
from typing import Any

import httpcore
from httpcore import AnyIOBackend
from typing_extensions import override

from cotrain.version import __version__
from cotrain_store.tenants.webhooks import SECRET_PREFIX, DueEvent

#: Time limit of a whole attempt in seconds, including name lookup and reading the answer.
TIMEOUT_S = 10.0
MAX_READ = 16 * 1024
#: Errors of an attempt without an answer.
_FAILURES = (
    httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError, ValueError,
)  # fmt: skip


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: IPv4 networks beyond those that Python 3.11 counts as not global: protocol assignments (with the
#: metadata of Oracle's cloud at 192.0.0.192), 6to4 relays, and the host agent of Azure.
_SPECIAL_V4 = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
#: All IPv6 addresses assigned to hosts on the Internet.
_UNICAST_V6 = IPv6Network("2000::/3")
#: Exceptions that are not hosts: protocol assignments (with Teredo), 6to4, examples.
_SPECIAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
#: IPv6 addresses that represent an IPv4 address behind a gateway, by their last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")
#: The same within a tunnel (ISATAP), by the preceding 32 bits, with or without the universal bit.
_ISATAP = (0x00005EFE, 0x02005EFE)
#: Names are resolved in dedicated threads, so a slow lookup delays no other work of the process.
_LOOKUPS = 32


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
        self._networks = [ip_network(each) for each in networks]
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="webhook-names")
        self._given_tls = tls

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """TLS context, created for the first event: loading the host's trust store takes longer
        than the rest of a start.
        """
        return self._given_tls or ssl.create_default_context()

    def close(self) -> None:
        """Stop waiting for lookups. No further events can be sent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def send(self, event: DueEvent, timestamp: int) -> str:
        """Send an event and return the status. Raises Undelivered for any status except 2xx."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status = await self._post(event, timestamp)
        except TimeoutError:
            raise Undelivered(f"no answer within {TIMEOUT_S:.0f} s") from None
        except (AddressRefused, *_FAILURES) as failed:
            raise Undelivered(_failure_of(failed)) from failed
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
        network = CheckedNetwork(self._networks, self._threads, encrypted=event.url.startswith("https:"))
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


def _failure_of(failed: Exception) -> str:
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


class AddressRefused(Exception):
    """No webhook may be sent to this address."""


class NameUnknown(httpcore.ConnectError):
    """No address is known of this name."""


def is_allowed(address: Address, networks: Iterable[Network], *, encrypted: bool) -> bool:
    """Return True if a webhook may connect to an address. Without encryption only configured networks are allowed."""
    really = _behind(address)
    if any(each.version == really.version and really in each for each in networks):
        return True
    return encrypted and _is_public(really)


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        is_odd = address.is_multicast or address.is_reserved
        return address.is_global and not is_odd and not any(address in net for net in _SPECIAL_V4)
    if address not in _UNICAST_V6 or any(address in net for net in _SPECIAL_V6):
        return False
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return _is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return True


def _behind(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address represents, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


class CheckedNetwork(AnyIOBackend):
    """Network of one request: connections to allowed addresses only, each to exactly the address that was checked."""

    def __init__(self, networks: Sequence[Network], threads: ThreadPoolExecutor, *, encrypted: bool) -> None:
        super().__init__()
        self._networks, self._threads, self._encrypted = networks, threads, encrypted

    @override
    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        """Connect to the first allowed address of a host. Raises AddressRefused if there is none."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, lambda: getaddrinfo(host, port, type=SOCK_STREAM))
        except (OSError, UnicodeError) as unknown:
            raise NameUnknown(f"{host} is not known") from unknown
        for address in dict.fromkeys(str(row[4][0]) for row in found):
            if is_allowed(ip_address(address), self._networks, encrypted=self._encrypted):
                return await super().connect_tcp(address, port, *args, **kwargs)
        raise AddressRefused(f"{host} is no address that webhooks may be sent to here")
