"""Which addresses a webhook may be sent to: public ones, and networks that the operator named.

An address is looked at when it is connected to, so that no name leads elsewhere than where it was checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from socket import SOCK_STREAM, getaddrinfo
from typing import Any

import httpcore
from httpcore import AnyIOBackend, AsyncNetworkBackend
from typing_extensions import override

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Of IPv4, beyond what Python 3.11 counts as not global: protocol assignments (with the metadata of Oracle's cloud
#: at 192.0.0.192), relays of 6to4, and the host agent of Azure.
_SPECIAL_V4 = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
#: All that is assigned of IPv6 for hosts on the Internet.
_UNICAST_V6 = IPv6Network("2000::/3")
#: Of those, not for hosts: protocol assignments (with Teredo), 6to4, examples.
_SPECIAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
#: Addresses of IPv6 that stand for one of IPv4, behind a gateway: its last 32 bits.
_NAT64 = IPv6Network("64:ff9b::/96")
#: The same within a tunnel (ISATAP), by the 32 bits before it: the universal bit is set or not.
_ISATAP = (0x00005EFE, 0x02005EFE)
#: Names are looked up in threads of their own, so that a slow one waits for no other work of the process.
_LOOKUPS = 32


class AddressRefused(Exception):
    """No webhook may be sent to this address."""


class NameUnknown(httpcore.ConnectError):
    """No address is known of this name."""


def is_allowed(address: Address, networks: Iterable[Network], *, encrypted: bool) -> bool:
    """Tell whether a webhook may go there; without encryption it may go to the named networks only."""
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
    """Return the address of IPv4 that one of IPv6 stands for, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


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
            raise NameUnknown(f"{host} is not known") from unknown
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
