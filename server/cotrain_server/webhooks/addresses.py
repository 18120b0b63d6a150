"""Which addresses a webhook may be sent to: public ones, and networks that the operator named.

An address is looked at when it is connected to, so that no name leads elsewhere than where it was checked.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from socket import SOCK_STREAM, getaddrinfo
from typing import TYPE_CHECKING, Any

import httpcore
from httpcore import AnyIOBackend, AsyncNetworkBackend
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Address = IPv4Address | IPv6Address
    Network = IPv4Network | IPv6Network

#: Addresses of IPv6 that stand for one of IPv4, behind a gateway: its last 32 bits.
_NAT64 = ip_network("64:ff9b::/96")
#: Names are looked up in threads of their own, so that a slow one waits for no other work of the process.
_LOOKUPS = 32


class AddressRefused(Exception):
    """No webhook may be sent to this address."""


def is_allowed(address: Address, networks: Iterable[Network], *, encrypted: bool) -> bool:
    """Tell whether a webhook may go there; without encryption it may go to the named networks only."""
    really = _behind(address)
    if any(each.version == really.version and really in each for each in networks):
        return True
    is_odd = really.is_multicast or really.is_reserved or getattr(really, "is_site_local", False)
    return encrypted and really.is_global and not is_odd


def _behind(address: Address) -> Address:
    """Return the address of IPv4 that one of IPv6 stands for, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return (
        address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address
    )


class CheckedNetwork(AsyncNetworkBackend):
    """Connects where `is_allowed` says yes, to the very address that was looked at."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = networks
        self._inner = AnyIOBackend()
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="webhook-names")

    def close(self) -> None:
        """Wait for no name any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def of(self, *, encrypted: bool) -> AsyncNetworkBackend:
        """Return the network of one request."""
        return _OneRequest(self, encrypted)

    async def connect(
        self, host: str, port: int, encrypted: bool, **how: Any
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first allowed address of a host. Raises AddressRefused where there is none."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, lambda: getaddrinfo(host, port, type=SOCK_STREAM)
            )
        except (OSError, UnicodeError) as unknown:
            raise httpcore.ConnectError(f"{host} is not known") from unknown
        for address in dict.fromkeys(str(row[4][0]) for row in found):
            if is_allowed(ip_address(address), self._networks, encrypted=encrypted):
                return await self._inner.connect_tcp(address, port, **how)
        raise AddressRefused(f"{host} is no address that webhooks may be sent to here")


class _OneRequest(AsyncNetworkBackend):
    """What a connection pool asks for connections."""

    def __init__(self, network: CheckedNetwork, encrypted: bool) -> None:
        self._network = network
        self._encrypted = encrypted

    @override
    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_: Any, **__: Any
    ) -> httpcore.AsyncNetworkStream:
        return await self._network.connect(host, port, self._encrypted, timeout=timeout)

    @override
    async def connect_unix_socket(self, path: str, *_: Any, **__: Any) -> Any:
        raise AddressRefused("a webhook goes to a host")

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
