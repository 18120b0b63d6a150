"""Settings of a client: server address and API key, and from the environment its proxy and trusted certificates.

httpx reads the same variables of proxies and certificates, but reports an unreadable value without naming the variable.
It also supports no networks in NO_PROXY, which container tools and VPNs write there.
"""

import os
import ssl
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from cotrain.errors import SettingsMissing

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
"""Default address of `cotrain serve`."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
"""In order of precedence."""


@dataclass(frozen=True)
class ClientSettings:
    """A server address and an API key for it."""

    base_url: str
    api_key: str = field(repr=False)

    @property
    def shown_url(self) -> str:
        """The address without user name and password."""
        return _shown(self.base_url)


def client_settings(base_url: str | None = None, api_key: str | None = None) -> ClientSettings:
    """Return settings from the arguments, else `COTRAIN_BASE_URL` and `COTRAIN_API_KEY`.

    Raises SettingsMissing.
    """
    api_key = api_key or os.environ.get("COTRAIN_API_KEY")
    if not api_key:
        raise SettingsMissing("no API key: pass api_key=… or set COTRAIN_API_KEY")
    base_url = base_url or os.environ.get("COTRAIN_BASE_URL") or DEFAULT_BASE_URL
    return ClientSettings(checked_url(base_url), _checked_key(api_key))


def checked_url(base_url: object) -> str:
    """Return the normalised server address. Raises SettingsMissing if it is not an HTTP URL."""
    if isinstance(base_url, str):
        url = base_url.strip().rstrip("/").removesuffix("/api/v1").rstrip("/")
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.netloc:
            return url
    raise SettingsMissing(f"the base URL must be like {DEFAULT_BASE_URL}, not {base_url!r}")


def _checked_key(api_key: object) -> str:
    if isinstance(api_key, str):
        key = api_key.strip()  # from a file or a variable it often ends with a newline
        if key.isascii() and key.isprintable():
            return key
    # The message does not contain the key.
    raise SettingsMissing("the API key must be text of visible ASCII characters")


@cache
def trusted() -> ssl.SSLContext:
    """Return the TLS context, shared by all clients, because reading all certificates takes 20 ms.

    Raises SettingsMissing, which names the variable, if its file or folder cannot be read.
    """
    name = next((name for name in CERTIFICATES if os.environ.get(name)), None)
    if name is None:
        return httpx.create_ssl_context(trust_env=False)
    path = Path(os.environ[name])
    try:
        if not path.exists():
            raise FileNotFoundError("there is no such file or folder")
        if path.is_dir():
            return ssl.create_default_context(capath=path)
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise SettingsMissing(f"{name} names {path}, whose certificates cannot be read: {error}") from error


def proxy_of(url: str) -> str | None:
    """Return the proxy for a URL, or None. Raises SettingsMissing."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    host, port = parts.hostname or "", parts.port
    entries = filter(None, (entry.strip().lower() for entry in proxies.get("no", "").split(",")))
    if not proxy or any(_is_meant(entry, host, port) for entry in entries):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    name = _variable_of(parts.scheme, proxies)
    try:
        httpx.Proxy(proxy)
    except (ValueError, httpx.InvalidURL) as error:
        raise SettingsMissing(f"{name} is no address of a proxy: {error}") from error
    if proxy.startswith("socks") and find_spec("socksio") is None:
        raise SettingsMissing(
            f"{name} names {_shown(proxy)}: for such a proxy install httpx[socks], "
            "or put the server's host into NO_PROXY"
        )
    return proxy


def through_proxy(url: str) -> str:
    """Return the part of an error message that names the proxy of a URL; "" without one."""
    proxy = proxy_of(url)
    if proxy is None:
        return ""
    name = _variable_of(urlsplit(url).scheme, getproxies())
    return f" through the proxy {_shown(proxy)} of {name} (NO_PROXY names hosts to reach without it)"


def _variable_of(scheme: str, proxies: dict[str, str]) -> str:
    kind = scheme if proxies.get(scheme) else "all"
    name = f"{kind}_proxy"
    return name if os.environ.get(name) else name.upper()


def _shown(url: str) -> str:
    """Return the address without user name and password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _is_meant(entry: str, host: str, port: int | None) -> bool:
    """Return True if an entry of NO_PROXY matches a host: by name, as part of a domain, or of a network."""
    if entry == "*":
        return True
    entry = entry.rpartition("://")[2]
    try:
        return ip_address(host) in ip_network(entry.replace("[", "").replace("]", ""), strict=False)
    except ValueError:  # one of them is a name, or has a port
        pass
    name, colon, its_port = entry.rpartition(":")
    if colon and its_port.isdecimal():
        if int(its_port) != port:
            return False
        entry = name
    domain = entry.strip("[]").removeprefix("*").removeprefix(".")
    return host == domain or host.endswith(f".{domain}")
