"""Server address and API key of a client."""

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cotrain.errors import SettingsMissing

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
"""Default address of `cotrain serve`."""


@dataclass(frozen=True)
class ClientSettings:
    """A server address and an API key for it."""

    base_url: str
    api_key: str = field(repr=False)

    @property
    def shown_url(self) -> str:
        """The address without user name and password."""
        scheme, _, rest = self.base_url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


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
