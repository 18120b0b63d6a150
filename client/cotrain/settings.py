"""Where a client's server is and which key opens it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cotrain.errors import SettingsMissing

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
"""Where `cotrain serve` listens by default."""


@dataclass(frozen=True)
class ClientSettings:
    """One server and one key for it."""

    base_url: str
    api_key: str = field(repr=False)

    @property
    def shown_url(self) -> str:
        """The address without a name and a password that it may hold."""
        scheme, _, rest = self.base_url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


def client_settings(base_url: str | None = None, api_key: str | None = None) -> ClientSettings:
    """Take what is given, else `COTRAIN_BASE_URL` and `COTRAIN_API_KEY`. Raises SettingsMissing."""
    api_key = api_key or os.environ.get("COTRAIN_API_KEY")
    if not api_key:
        raise SettingsMissing("no API key: pass api_key=… or set COTRAIN_API_KEY")
    base_url = base_url or os.environ.get("COTRAIN_BASE_URL") or DEFAULT_BASE_URL
    return ClientSettings(checked_url(base_url), _checked_key(api_key))


def checked_url(base_url: object) -> str:
    """Give a server's address as it is used. Raises SettingsMissing where no request could go there."""
    if isinstance(base_url, str):
        url = base_url.strip().rstrip("/").removesuffix("/api/v1").rstrip("/")
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.netloc:
            return url
    raise SettingsMissing(f"the base URL must be like {DEFAULT_BASE_URL}, not {base_url!r}")


def _checked_key(api_key: object) -> str:
    if isinstance(api_key, str):
        key = api_key.strip()  # of a file or a variable it often comes with the end of a line
        if key.isascii() and key.isprintable():
            return key
    raise SettingsMissing(
        "the API key must be text of visible ASCII characters"
    )  # not shown: a key
