"""Settings of the API process: what the store needs, and what HTTP adds. All are `COTRAIN_*`."""

from __future__ import annotations

from pathlib import Path  # pydantic reads the annotation at run time
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from cotrain_store.oplog.intake import TenantLimits
from cotrain_store.sampling.intake import SampleLimits
from cotrain_store.settings.store import StoreSettings
from cotrain_store.tenants.key_format import MIN_CHARACTERS, read_chosen_keys
from cotrain_store.tenants.records import RecordLimits

if TYPE_CHECKING:
    from cotrain_store.tenants.key_format import ChosenKey

MIB = 1024**2

Words = Annotated[tuple[str, ...], NoDecode]
"""A list in one variable, separated by commas or white space."""


def split_words(text: str) -> list[str]:
    """Split a list in one text, as `Words` is written."""
    return text.replace(",", " ").split()


class ServerSettings(StoreSettings):
    """How the API listens, what it lets in, and what it tells clients."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    listen_fd: int | None = None
    """An open listening socket to use in place of host and port; `cotrain serve` hands it down."""
    base_models: Words = ()
    """Base models that must have a live worker before `/readyz` says yes; by default any one."""
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    """Keys to accept beside those made with `cotrain keys create`, `KEY` or `NAME=KEY`; each is a
    tenant of its own. They are good as long as they stand here."""
    api_keys_file: Path | None = None
    """A file with more of them, separated like those."""
    admin_key: SecretStr | None = None
    """Opens `/metrics` and the whole of `/status`. Without it, `admin-key` in the data folder does."""
    trusted_proxies: Words = ()
    """Addresses or networks whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed."""
    public_url: Annotated[str | None, Field(pattern=r"^https?://[^\s?#]+$")] = None
    """How clients reach this server, for links to files; by default as their request reached it."""
    jwt_auth: Literal["needed", "always"] = "needed"
    """Which clients exchange their key for a token: those whose key an SDK takes in no other way
    (`sk-…`), or all."""

    max_rank: Annotated[int, Field(ge=1)] = 128
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * MIB
    """Largest request, as sent and once decompressed."""
    max_upload_bytes: Annotated[int, Field(ge=1024)] = 512 * MIB
    """Largest adapter that can be uploaded, as sent and once unpacked."""
    long_poll_s: Annotated[float, Field(gt=0, le=40)] = 25.0
    """How long a poll for a result is held; the SDK's socket gives up after 45 s."""

    quota_ops: Annotated[int, Field(ge=1)] = 512
    quota_tokens: Annotated[int, Field(ge=1)] = 8_000_000
    quota_bytes: Annotated[int, Field(ge=1)] = 1_000_000_000
    quota_runs: Annotated[int, Field(ge=1)] = 1_000
    quota_unread_bytes: Annotated[int, Field(ge=1)] = 2_000_000_000
    """Results of one tenant that were never fetched; over it, nothing new is accepted."""
    quota_record_bytes: Annotated[int, Field(ge=1)] = 200_000_000
    """What is kept for ever of one tenant's sessions and runs, with their metadata: it is in memory."""
    quota_sessions: Annotated[int, Field(ge=1)] = 10_000
    quota_samplers: Annotated[int, Field(ge=1)] = 10_000
    """Sessions whose client is alive, and samplers, that one tenant may have."""
    quota_sampler_bytes: Annotated[int, Field(ge=1)] = 100_000_000_000
    """Weights that a tenant's saves without a name left; over it, samplers without use for half an
    hour make room for new ones."""
    quota_polls: Annotated[int, Field(ge=1)] = 2_000
    """Polls one tenant may hold open in one API process."""
    quota_samples: Annotated[int, Field(ge=1)] = 2_000
    """Sample requests one tenant may have waiting or running; over it, clients slow down."""
    quota_checkpoints: Annotated[int, Field(ge=1)] = 10_000
    quota_checkpoint_bytes: Annotated[int, Field(ge=1)] = 100_000_000_000
    """Checkpoints one tenant may have stored, and their bytes; over it, saves fail."""
    batch_polling: bool = True
    """Whether SDKs that can (0.38) wait for all results of a sampler with one poll."""

    chunk_datums: Annotated[int, Field(ge=1)] = 65_536
    """SDK 0.38 cuts larger calls of forward_backward into requests of this many datums."""
    chunk_bytes: Annotated[int, Field(ge=1)] = 32_000_000
    """As it counts them: arrays alone, before compression. No more than half a body is promised it."""
    compress_requests: bool | None = None
    """Whether SDKs send zstd; by default those do that are not on this host."""

    @field_validator("base_models", "api_keys", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_words(value) if isinstance(value, str) else value

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

    @property
    def tenant_limits(self) -> TenantLimits:
        """What one tenant may have waiting."""
        return TenantLimits(
            self.quota_ops, self.quota_tokens, self.quota_bytes, self.quota_runs,
            self.quota_unread_bytes, self.quota_samplers, self.quota_sampler_bytes,
            self.quota_record_bytes,
        )  # fmt: skip

    @property
    def sample_limits(self) -> SampleLimits:
        """What one tenant may have waiting and running of sample requests."""
        return SampleLimits(self.quota_samples, self.quota_bytes, self.quota_unread_bytes)

    @property
    def record_limits(self) -> RecordLimits:
        """What one tenant may have of sessions and samplers, and of records of what it had."""
        return RecordLimits(self.quota_sessions, self.quota_samplers, self.quota_record_bytes)
