"""Settings of the API process: what the store needs, and what HTTP adds. All are `COTRAIN_*`."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path  # pydantic reads the annotation at run time
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)

from cotrain_store.messages.runs import HISTORY_POINTS
from cotrain_store.oplog.submission import TenantLimits
from cotrain_store.sampling.intake import SampleLimits
from cotrain_store.settings.store import StoreSettings
from cotrain_store.tenants.api_keys import MIN_CHARACTERS, ChosenKey, read_chosen_keys
from cotrain_store.tenants.records import RecordLimits

MIB = 1024**2

#: Scripts count exactly up to 2**53.
LIMITS = 10**15
AtLeastOne = Annotated[int, Field(ge=1, le=LIMITS)]

Words = tuple[str, ...]
"""A list in one variable, separated by commas or white space."""


def split_words(text: str) -> list[str]:
    """Split a list in one text, as `Words` is written."""
    return text.replace(",", " ").split()


class Quotas(BaseModel):
    """What one tenant may have; over it, requests are refused or wait, as docs/reliability.md says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ops: AtLeastOne = 512
    """Requests that wait in one pool, with `tokens` and `bytes` of theirs."""
    tokens: AtLeastOne = 8_000_000
    bytes: AtLeastOne = 1_000_000_000
    runs: AtLeastOne = 1_000
    run_bytes: Annotated[int, Field(ge=0, le=LIMITS)] = 0
    """What live runs hold: each its state once in memory and twice on disk. 0: 200 GB or, where that is
    more, eight runs of the largest rank on the largest base model."""
    unread_bytes: AtLeastOne = 2_000_000_000
    """Results that were never fetched; over it, nothing new is accepted."""
    record_bytes: AtLeastOne = 200_000_000
    """Sessions and runs, also ended ones, with their metadata: Redis keeps them in memory."""
    history_points: AtLeastOne = HISTORY_POINTS
    """Points of the histories of all runs, some 80 bytes each in Redis; over it, those go that were
    added to longest ago. Counts from the next run on."""
    sessions: AtLeastOne = 10_000
    """Sessions whose client is alive."""
    samplers: AtLeastOne = 10_000
    sampler_bytes: AtLeastOne = 100_000_000_000
    """Weights that saves without a name left; over it, samplers without use for half an hour make
    way for new ones."""
    polls: AtLeastOne = 2_000
    """Polls held open in one API process."""
    samples: AtLeastOne = 2_000
    """Sample requests waiting or running; over it, clients slow down."""
    sample_tokens: AtLeastOne = 16_000_000
    """What those may come to: prompts, and `num_samples` times `max_tokens`; over it, clients slow down."""
    checkpoints: AtLeastOne = 10_000
    checkpoint_bytes: AtLeastOne = 100_000_000_000
    """Stored checkpoints, and their bytes; over it, saves fail."""

    def over(self, own: Mapping[str, int]) -> Quotas:
        """Return these with a tenant's own over them; a name of another version is passed over."""
        return self.model_copy(update={n: v for n, v in own.items() if n in Quotas.model_fields})

    @property
    def tenant_limits(self) -> TenantLimits:
        """What one tenant may have waiting."""
        return TenantLimits(
            self.ops, self.tokens, self.bytes, self.runs, self.unread_bytes, self.samplers,
            self.sampler_bytes, self.run_bytes, self.record_bytes, self.history_points,
        )  # fmt: skip

    @property
    def sample_limits(self) -> SampleLimits:
        """What one tenant may have waiting and running of sample requests."""
        return SampleLimits(self.samples, self.bytes, self.unread_bytes, self.sample_tokens)

    @property
    def record_limits(self) -> RecordLimits:
        """What one tenant may have of sessions and samplers, and of records of what it had."""
        return RecordLimits(self.sessions, self.samplers, self.record_bytes)


def read_quotas(given: object) -> object:
    """Read `ops=1000,tokens=16000000`; what is not named keeps its default.

    Raises:
        ValueError: a name that is no quota, or a number below 1; it says which.
    """
    if not isinstance(given, str):
        return given
    named = dict(word.partition("=")[::2] for word in split_words(given))
    if unknown := sorted(named.keys() - Quotas.model_fields.keys()):
        raise ValueError(
            f"{', '.join(unknown)}: no quota; there are {', '.join(Quotas.model_fields)}"
        )
    try:
        return Quotas.model_validate(named)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]}: {first['msg']}") from None


class ServerSettings(StoreSettings):
    """How the API listens, what it lets in, and what it tells clients."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    base_models: Words = ()
    """Base models that must have a live worker before `/readyz` says yes; by default any one."""
    api_keys: tuple[SecretStr, ...] = ()
    """Keys to accept besides those made with `cotrain keys create`, `KEY` or `NAME=KEY`; each is a
    tenant of its own. They are good as long as they stand here."""
    api_keys_file: Path | None = None
    """A file with more of them, separated like those."""
    admin_key: SecretStr | None = None
    """Opens `/metrics` and the whole of `/status`. Without it, `admin-key` in the data folder does."""
    trusted_proxies: Words = ()
    """Addresses or networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed."""
    public_url: Annotated[str | None, Field(pattern=r"^https?://[^\s?#]+$")] = None
    """How clients reach this server, for links to files; by default as their request reached it."""
    access_log: bool = False
    """Whether each request is a line of the log; without it, those that are refused are."""
    webhook_networks: Words = ()
    """Private networks or addresses that webhooks may be sent to, also with `http://`; by default none."""
    jwt_auth: Literal["needed", "always"] = "needed"
    """Which clients exchange their key for a token: those whose key an SDK takes in no other way
    (`sk-…`), or all."""

    max_rank: Annotated[int, Field(ge=1)] = 128
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * MIB
    """Largest request, as sent and once decompressed."""
    max_upload_bytes: Annotated[int, Field(ge=1024)] = 512 * MIB
    """Largest adapter that can be uploaded, as sent and once unpacked."""
    quotas: Annotated[Quotas, BeforeValidator(read_quotas)] = Quotas()
    """What one tenant may have, `NAME=NUMBER` separated by commas or white space."""

    @field_validator(
        "base_models", "api_keys", "trusted_proxies", "webhook_networks", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        return split_words(value) if isinstance(value, str) else value

    @field_validator("webhook_networks")
    @classmethod
    def _are_networks(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            ip_network(each)  # its error names what is wrong
        return given

    @field_validator("admin_key", "public_url", "api_keys_file", mode="before")
    @classmethod
    def _unset_if_empty(cls, value: object) -> object:
        # A container passes an unset variable on as an empty one; no empty key may open anything.
        return value or None

    @field_validator("admin_key")
    @classmethod
    def _not_short(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < MIN_CHARACTERS:
            raise ValueError(f"too easy to guess: {MIN_CHARACTERS} characters or more")
        return key

    @property
    def chosen_keys(self) -> tuple[ChosenKey, ...]:
        """Read the keys to accept; raises InvalidKey, or OSError for a file that cannot be read."""
        written = [key.get_secret_value() for key in self.api_keys]
        if self.api_keys_file is not None:
            written += split_words(self.api_keys_file.read_text())
        return read_chosen_keys(written)
