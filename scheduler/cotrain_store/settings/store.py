"""Settings shared by all processes. Each process adds its own, reads them once at start and passes them on."""

import os
from pathlib import Path  # pydantic reads the annotation at run time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import override

from cotrain_store.blobs.opening import check_url, open_blobs
from cotrain_store.blobs.protocol import Blobs
from cotrain_store.disk.object_spool import ObjectSpool
from cotrain_store.disk.spool import Spool
from cotrain_store.redis_client.address import parse_address, with_password

PREFIX = "COTRAIN_"

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"],
    BeforeValidator(lambda given: given.lower() if isinstance(given, str) else given),
]


class _Variables(PydanticBaseSettingsSource):
    """Settings source for the `COTRAIN_*` variables, each a text that its field's validators read.

    The sources of pydantic-settings check for every field whether its text is JSON. Without these checks, settings
    load in a quarter of the time.
    """

    @override
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return os.environ.get(f"{PREFIX}{field_name.upper()}"), field_name, False

    @override
    def __call__(self) -> dict[str, Any]:
        read = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: text for name, text in read.items() if text is not None}


class StoreSettings(BaseSettings):
    """Settings that every process reads. Every field is a `COTRAIN_*` variable."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    @classmethod
    @override
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings: arguments, then the environment. There is no settings file."""
        return init_settings, _Variables(settings_cls)

    redis_url: str
    """`unix:///path/redis.sock` or `redis://user:password@host:port/0`. `redis_client/address.py` describes the
    forms for TLS and for Sentinels."""
    redis_password_file: Path | None = None
    """File with the password of `redis_url`, which must then contain none. Unlike a variable, a file is not visible
    in the environment of the process."""
    data_dir: Path
    """Folder of the spool, snapshots, logs and the embedded Redis. One per server."""
    blobs: str = ""
    """URL of the spool, snapshots and saved weights, if outside the data folder: `s3://bucket/prefix`, `gs://…`,
    `az://…`, or `file:///path`. The data folder then belongs to this host alone."""
    accept_data_loss: bool = False
    """Permission to start on a Redis that could lose acknowledged writes."""
    log_level: LogLevel = "info"
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Port on `metrics_host` on which this process publishes its metrics without authentication; 0: none."""
    disk_reserve_bytes: Annotated[int, Field(ge=0)] = 2 * 1024**3
    """Free disk space in bytes below which new work is rejected, so that accepted work can always finish."""
    gap_limit_s: Annotated[float, Field(gt=0)] = 900.0
    """Time in s after which requests that wait for a missing seq_id fail. The API reports it to waiting clients."""

    @model_validator(mode="before")
    @classmethod
    def _with_password(cls, given: dict[str, Any]) -> dict[str, Any]:
        url, file = given.get("redis_url"), given.get("redis_password_file")
        if file and url:
            return given | {"redis_url": with_password_of(url, Path(file))}
        return given if file else {**given, "redis_password_file": None}

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, given: str) -> str:
        parse_address(given)
        return given

    @field_validator("blobs")
    @classmethod
    def _check_blobs(cls, given: str) -> str:
        if given:
            check_url(given)
        return given.rstrip("/")

    @property
    def blob_store(self) -> Blobs:
        """Storage of data too large for Redis: body spool, recovery copies, saved weights, tokenizers."""
        return open_blobs(self.blobs, self.data_dir)

    def open_spool(self, writer: str) -> Spool:
        """Open the spool for bodies and results too large for Redis; raises OSError."""
        spool = self.blob_store.below("spool")
        return Spool(spool.folder, writer) if spool.folder else ObjectSpool(spool, writer, self.data_dir)


def with_password_of(url: str, file: Path) -> str:
    """Return the URL of a Redis, with the password from a file inserted. Raises ValueError: the URL already contains a
    password, or the file is empty or cannot be read.
    """
    try:
        password = file.read_text(encoding="utf-8").strip()
    except OSError as unread:
        raise ValueError(f"redis_password_file: {file}: {unread.strerror}.") from None
    if not password:
        raise ValueError(f"redis_password_file: {file} is empty.")
    return with_password(url, password)
