"""Listening sockets: for IPv4, IPv6 or both, with a sentence where there can be none."""

import errno
import socket

#: Every address of the host, of both kinds.
ANY_ADDRESS = "::"
LAST_PORT = 2**16 - 1
BACKLOG = 4096


class CannotListen(Exception):
    """This address cannot be listened on."""


def listen(host: str, port: int, *, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that takes connections to `host`, a name or an address; port 0 takes a free one.

    `::` takes those of IPv4 too. Raises CannotListen, which names the address and the reason.
    """
    try:
        family = _family(host, port)
        is_dual = host == ANY_ADDRESS and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=is_dual)
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"Cannot listen on {address(host, port)}: {_reason(error)}") from error


def address(host: str, port: int) -> str:
    """Write a host and a port as a URL has them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_address(host: str) -> str:
    """Return a client's address as it wrote it: a socket of both kinds shows IPv4 in IPv6 form."""
    return host.removeprefix("::ffff:") if "." in host else host


def _family(host: str, port: int) -> socket.AddressFamily:
    if not 0 <= port <= LAST_PORT:
        raise OSError(errno.EINVAL, f"a port is 0 to {LAST_PORT}")
    if not host:
        raise OSError(errno.EINVAL, "no host was given")
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = [each[0] for each in found]
    return socket.AF_INET if socket.AF_INET in families else families[0]


def _reason(error: Exception) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "this host knows no such name or address."
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "Address already in use. Another program has this port; choose another one."
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return "it is no address of this host."
    return f"{getattr(error, 'strerror', None) or error}."
