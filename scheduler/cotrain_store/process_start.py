"""Start of a process: its settings, traces and listening sockets, or its exit where a restart would not help.

Every process that exits so does the same: a log line with a `reason`, which is a sentence for the operator, and its own
exit status.
"""

import errno
import json
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import structlog
from pydantic import ValidationError

from cotrain_store.monitoring.traces import TracingRefused, start_tracing
from cotrain_store.settings import PREFIX, StoreSettings

log = structlog.get_logger()

EXIT_CODE = 2
Settings = TypeVar("Settings", bound=StoreSettings)


def refuse(event: str, reason: str) -> NoReturn:
    """Log the reason why this process does not start, and exit."""
    log.error(event, reason=reason)
    sys.exit(EXIT_CODE)


def read_settings(kind: type[Settings]) -> Settings:
    """Return a process' settings; exit if one is invalid.

    Values are not quoted: some are secrets.
    """
    try:
        return kind()
    except ValidationError as error:
        refuse("settings_refused", _settings_reason(error))


def _settings_reason(error: ValidationError) -> str:
    """Return the first invalid setting and the errors of all its alternatives, for example of `auto` or a number."""
    wrong = error.errors()
    field = wrong[0]["loc"][:1]
    name = f"{PREFIX}{field[0]}: ".upper() if field else ""
    reasons = [each["msg"].removeprefix("Value error, ").rstrip(".") for each in wrong if each["loc"][:1] == field]
    return f"{name}{'; or: '.join(reasons)}."


def trace_or_refuse(process: str, instance: str, *, decides: bool = False) -> None:
    """Start to report spans if the environment configures it; exit if that is impossible."""
    try:
        start_tracing(process, instance, decides=decides)
    except TracingRefused as refused:
        refuse("tracing_refused", str(refused))


def last_reason(lines: Sequence[str]) -> str | None:
    """Return the newest `reason` in lines of a log, or None."""
    for line in reversed(lines):
        try:
            reason = json.loads(line).get("reason")
        except (ValueError, AttributeError):
            continue
        if isinstance(reason, str):
            return reason
    return None


#: All addresses of the host, of IPv6 and IPv4.
ANY_ADDRESS = "::"
LAST_PORT = 2**16 - 1
BACKLOG = 4096


class CannotListen(Exception):
    """This address cannot be listened on."""


def listen(host: str, port: int, *, backlog: int = BACKLOG) -> socket.socket:
    """Return a listening socket for `host`, a name or an address; port 0 selects a free port.

    `::` also accepts connections of IPv4. Raises CannotListen, which names the address and the reason.
    """
    try:
        family = _family(host, port)
        is_dual = host == ANY_ADDRESS and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=is_dual)
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"Cannot listen on {address(host, port)}: {_socket_reason(error)}") from error


def address(host: str, port: int) -> str:
    """Return a host and a port in the form of a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_address(host: str) -> str:
    """Return a client's address in its own form: a socket for IPv6 and IPv4 shows the latter as IPv6."""
    return host.removeprefix("::ffff:") if "." in host else host


def _family(host: str, port: int) -> socket.AddressFamily:
    if not 0 <= port <= LAST_PORT:
        raise OSError(errno.EINVAL, f"a port is 0 to {LAST_PORT}")
    if not host:
        raise OSError(errno.EINVAL, "no host was given")
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = [each[0] for each in found]
    return socket.AF_INET if socket.AF_INET in families else families[0]


def _socket_reason(error: Exception) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "this host knows no such name or address."
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "Address already in use. Another program has this port; choose another one."
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return "it is no address of this host."
    return f"{getattr(error, 'strerror', None) or error}."
