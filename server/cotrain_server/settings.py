"""Settings of the API process: those of the store, and those of HTTP. All are `COTRAIN_*` variables."""

import os
import secrets
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator

from cotrain_store.settings import StoreSettings
from cotrain_store.tenants.api_keys import MIN_CHARACTERS, ChosenKey, read_chosen_keys
from cotrain_store.tenants.quotas import Quotas

#: File name in the data folder, where `cotrain top` reads it.
ADMIN_KEY_FILE = "admin-key"
MIB = 1024**2

Words = tuple[str, ...]
"""A list in one variable, separated by commas or white space."""


def split_words(text: str) -> list[str]:
    """Split a list in the format of `Words`."""
    return text.replace(",", " ").split()


def _read_quotas(given: object) -> object:
    """Parse `ops=1000,tokens=16000000`. Omitted quotas keep their defaults. Raises ValueError: an unknown quota or a
    number below 1; the message names it.
    """
    if not isinstance(given, str):
        return given
    named = dict(word.partition("=")[::2] for word in split_words(given))
    if unknown := sorted(named.keys() - Quotas.model_fields.keys()):
        raise ValueError(f"{', '.join(unknown)}: no quota; there are {', '.join(Quotas.model_fields)}")
    try:
        return Quotas.model_validate(named)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]}: {first['msg']}") from None


class ServerSettings(StoreSettings):
    """Settings of the API: listening address, access, limits and client configuration."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    base_models: Words = ()
    """Base models that need a live worker before `/readyz` reports ready; by default any one."""
    api_keys: tuple[SecretStr, ...] = ()
    """Keys to accept besides those created with `cotrain keys create`, as `KEY` or `NAME=KEY`. Each
    is a separate tenant. They are valid while they are configured.
    """
    api_keys_file: Path | None = None
    """File with more keys in the same format."""
    admin_key: SecretStr | None = None
    """Grants access to `/metrics` and the whole of `/status`. Default: `admin-key` in the data folder."""
    trusted_proxies: Words = ()
    """Addresses or networks with trusted `X-Forwarded-For` and `X-Forwarded-Proto` headers."""
    public_url: Annotated[str | None, Field(pattern=r"^https?://[^\s?#]+$")] = None
    """Public URL of this server for links to files. Default: the URL of the client's request."""
    access_log: bool = False
    """True to log each request, False to log only refused ones."""
    webhook_networks: Words = ()
    """Private networks or addresses allowed for webhooks, also with `http://`; by default none."""
    cors_origins: Words = ()
    """Origins of web pages that may call the API from a browser, or `*`; by default none."""
    jwt_auth: Literal["needed", "always"] = "needed"
    """Clients that exchange their key for a token: those with a key that an SDK accepts in no other
    way (`sk-…`), or all.
    """

    max_rank: Annotated[int, Field(ge=1)] = 128
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * MIB
    """Maximum size of a request in bytes, as sent and once decompressed."""
    max_upload_bytes: Annotated[int, Field(ge=1024)] = 512 * MIB
    """Maximum size of an uploaded adapter in bytes, as sent and once unpacked."""
    quotas: Annotated[Quotas, BeforeValidator(_read_quotas)] = Quotas()
    """Quotas of each tenant, `NAME=NUMBER` separated by commas or white space."""

    @field_validator("base_models", "api_keys", "trusted_proxies", "webhook_networks", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_words(value) if isinstance(value, str) else value

    @field_validator("webhook_networks")
    @classmethod
    def _are_networks(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            ip_network(each)  # its error names the fault
        return given

    @field_validator("admin_key", "public_url", "api_keys_file", mode="before")
    @classmethod
    def _unset_if_empty(cls, value: object) -> object:
        # A container passes an unset variable on as an empty one. An empty key must grant nothing.
        return value or None

    @field_validator("admin_key")
    @classmethod
    def _not_short(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < MIN_CHARACTERS:
            raise ValueError(f"too easy to guess: {MIN_CHARACTERS} characters or more")
        return key

    @property
    def chosen_keys(self) -> tuple[ChosenKey, ...]:
        """Configured keys. Raises InvalidKey, or OSError for an unreadable file."""
        written = [key.get_secret_value() for key in self.api_keys]
        if self.api_keys_file is not None:
            written += split_words(self.api_keys_file.read_text())
        return read_chosen_keys(written)

    def read_admin_key(self) -> str:
        """Return the configured admin key, otherwise that of the data folder, which is created if missing.

        An address proves nothing: behind a proxy on this host that adds no header, every client appears to come from
        loopback.

        Raises:
            OSError: the file cannot be read or created.
            ValueError: the file contains no key.
        """
        if self.admin_key is not None:
            return self.admin_key.get_secret_value()
        path = self.data_dir / ADMIN_KEY_FILE
        if not path.exists():
            _make_key(path)
        key = path.read_text().strip()
        if len(key) < MIN_CHARACTERS:
            raise ValueError(f"{path} holds no key. Delete it: the next start makes one.")
        return key


def _make_key(path: Path) -> None:
    """Write a key that only the owner of the folder can read. Another process may do the same concurrently."""
    temporary = path.with_suffix(f".{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_urlsafe(32)}\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
