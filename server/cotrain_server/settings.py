"""Settings of the API process: those of the store, and those of HTTP. All are `COTRAIN_*` variables."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path  # pydantic reads the annotation at run time
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator

from cotrain_store.messages.runs import HISTORY_POINTS
from cotrain_store.sampling.intake import SampleLimits
from cotrain_store.settings import StoreSettings
from cotrain_store.tenants.api_keys import MIN_CHARACTERS, ChosenKey, read_chosen_keys
from cotrain_store.tenants.policies import TenantLimits
from cotrain_store.tenants.records import RecordLimits

MIB = 1024**2

#: Lua scripts count exactly up to 2**53.
LIMITS = 10**15
AtLeastOne = Annotated[int, Field(ge=1, le=LIMITS)]

Words = tuple[str, ...]
"""A list in one variable, separated by commas or white space."""


def split_words(text: str) -> list[str]:
    """Split a list in the format of `Words`."""
    return text.replace(",", " ").split()


class Quotas(BaseModel):
    """Quotas of one tenant. Requests above them are refused or wait, see docs/operate/limits.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ops: AtLeastOne = 512
    """Pending requests in one pool, with limits on their `tokens` and `bytes`."""
    tokens: AtLeastOne = 8_000_000
    bytes: AtLeastOne = 1_000_000_000
    runs: AtLeastOne = 1_000
    run_bytes: Annotated[int, Field(ge=0, le=LIMITS)] = 0
    """Bytes of live runs, each with its state once in memory and twice on disk. 0: 200 GB or, if
    larger, eight runs of the largest rank on the largest base model.
    """
    unread_bytes: AtLeastOne = 2_000_000_000
    """Bytes of unfetched results. Above it, new requests are refused."""
    record_bytes: AtLeastOne = 200_000_000
    """Bytes of sessions and runs with their metadata, including ended ones: Redis keeps them in memory."""
    history_points: AtLeastOne = HISTORY_POINTS
    """Points of the histories of all runs, about 80 bytes each in Redis. Above it, the least
    recently extended histories are deleted. Applied from the next run on.
    """
    sessions: AtLeastOne = 10_000
    """Sessions with a live client."""
    samplers: AtLeastOne = 10_000
    sampler_bytes: AtLeastOne = 100_000_000_000
    """Bytes of weights from saves without a name. Above it, samplers unused for half an hour are replaced by new ones.
    """
    polls: AtLeastOne = 2_000
    """Open polls in one API process."""
    samples: AtLeastOne = 2_000
    """Sample requests that are waiting or running. Above it, clients slow down."""
    sample_tokens: AtLeastOne = 16_000_000
    """Maximum tokens of these requests: prompts plus `num_samples` times `max_tokens`. Above it, clients slow down."""
    checkpoints: AtLeastOne = 10_000
    checkpoint_bytes: AtLeastOne = 100_000_000_000
    """Stored checkpoints and their bytes. Above it, saves fail."""

    def over(self, own: Mapping[str, int]) -> Quotas:
        """Return these quotas overridden by a tenant's own. Names of other versions are ignored."""
        return self.model_copy(update={n: v for n, v in own.items() if n in Quotas.model_fields})

    @property
    def tenant_limits(self) -> TenantLimits:
        """Limits on one tenant's pending requests."""
        return TenantLimits(
            self.ops, self.tokens, self.bytes, self.runs, self.unread_bytes, self.samplers,
            self.sampler_bytes, self.run_bytes, self.record_bytes, self.history_points,
        )  # fmt: skip

    @property
    def sample_limits(self) -> SampleLimits:
        """Limits on one tenant's waiting and running sample requests."""
        return SampleLimits(self.samples, self.bytes, self.unread_bytes, self.sample_tokens)

    @property
    def record_limits(self) -> RecordLimits:
        """Limits on one tenant's sessions, samplers and records."""
        return RecordLimits(self.sessions, self.samplers, self.record_bytes)


def read_quotas(given: object) -> object:
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
    quotas: Annotated[Quotas, BeforeValidator(read_quotas)] = Quotas()
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
