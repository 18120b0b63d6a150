"""Settings of the scheduler and of a worker, and those that all processes share. The API adds its own.

Each process reads them once at start and passes them on. No torch is imported, because the supervisor reads their names.
"""

import re
from enum import StrEnum
from hashlib import sha256
from pathlib import Path  # pydantic reads the annotation at run time
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cotrain_store.blobs.opening import check_url, open_blobs
from cotrain_store.blobs.protocol import Blobs
from cotrain_store.disk.object_spool import ObjectSpool
from cotrain_store.disk.spool import Spool
from cotrain_store.disk.sweep import ORPHAN_AGE_S
from cotrain_store.messages.ids import PoolId
from cotrain_store.redis_client.address import parse_address, with_password

PREFIX = "COTRAIN_"
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"],
    BeforeValidator(lambda given: given.lower() if isinstance(given, str) else given),
]


class StoreSettings(BaseSettings):
    """Settings that every process reads. Every field is a `COTRAIN_*` variable."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=PREFIX, enable_decoding=False,  # the validators of a field read its text
    )  # fmt: skip

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


class ClockMode(StrEnum):
    """Start condition of a cycle."""

    #: A worker is idle, and a request is queued.
    EAGER = "eager"
    #: The time is a multiple of the period, as the hosted services document it.
    METRONOME = "metronome"


class SchedulerSettings(StoreSettings):
    """Settings of the clock and the planner. Every field is also a `COTRAIN_*` variable."""

    clock_mode: ClockMode = ClockMode.EAGER
    clock_period_s: float = Field(default=10.0, gt=0, le=3600)
    """Target time in s for the result of a small request. In metronome mode, the interval between cycle starts."""
    reassign_after_s: float = Field(default=30.0, gt=0)
    """Time in s without a heartbeat after which another worker of the pool takes over a worker's work."""
    workers_min: int = Field(default=1, ge=0)
    """Minimum of the recommended number of workers of a pool; 0: none after `idle_after_s` without work."""
    workers_max: int = Field(default=0, ge=0)
    """Maximum of the recommended number of workers of a pool; 0: no limit."""
    idle_after_s: float = Field(default=900.0, gt=0)
    """Time in s without work after which a pool counts as idle."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if 0 < self.workers_max < self.workers_min:
            raise ValueError(f"workers_max: {self.workers_max} is less than workers_min.")
        return self


#: Value of `worker_id` that selects the first free id.
FIRST_FREE = "auto"


class WorkerSettings(StoreSettings):
    """Base model, device and limits of one worker. Every field is also a `COTRAIN_*` variable."""

    base_model: str
    """Hub id, local folder, or `NAME=FOLDER` to serve a folder under another name."""
    worker_id: str = Field(default=FIRST_FREE, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Id in the pool. A second process with the same id does not start while the first one runs.
    `auto`: the first of w0, w1, … that no running process uses."""
    workers_on_host: int = Field(default=1, ge=1)
    """Number of workers that share this host's memory, set by `cotrain serve` and `cotrain worker`."""
    group_size: int = Field(default=1, ge=1, le=64)
    """Number of processes that form one worker and hold a part of the base model each; 1: this one holds all of it."""
    group_timeout_s: float = Field(default=300.0, gt=0)
    """Maximum time in s for which the processes of a group wait for one another. After it, all of them end."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: float32 on the CPU, bfloat16 on CUDA."""
    quantization: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Bits of the frozen weights of the base model's linear modules: 8 (`int8`, `fp8`), 4 (`nf4`), or those of
    `dtype` (`none`). Adapters keep float32."""
    torch_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0: chosen by torch. Repeatable results require a fixed number."""
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=256)] = "auto"
    """Maximum tokens of one pass of the base model. `auto`: 2,048 on the CPU; on CUDA, as many as memory allows,
    measured once and stored."""
    adapter_bytes: int = Field(default=0, ge=0)
    """Device memory for adapters; 0: a share of a GPU, no limit on a CPU. Idle runs are offloaded to
    host memory when it is full, so it does not limit the number of runs."""
    host_bytes: int = Field(default=0, ge=0)
    """Host memory for offloaded adapters; 0: half of the memory free at the start, divided among the workers of
    the host. Above the limit, the least recently used ones are evicted to disk."""
    max_rank: int = Field(default=128, ge=1, le=1024)
    offline: bool = False
    """No access to a hub: the base model must be a folder or in the local cache."""
    replay_backlog_s: float = Field(default=30.0, gt=0)
    """Replay time of a run's log in s at which a recovery copy is due."""
    orphan_age_s: float = Field(default=ORPHAN_AGE_S, ge=0)
    """Time in s after which this process removes a file that it observed to be unreferenced."""
    record_cycles: int = Field(default=0, ge=0)
    """Number of latest cycles that are recorded for `cotrain replay`; 0: none."""
    stop_grace_s: float = Field(default=60.0, gt=0)
    """Time in s between SIGTERM and SIGKILL. It limits the drain of a worker."""
    sampler: Literal["engine", "vllm"] = "engine"
    """Generator of tokens: this process, time-shared with training, or a vLLM server."""
    sampling_share: float = Field(default=0.5, ge=0, le=0.9)
    """Maximum share of the processor for sampling while training is pending."""
    kv_cache_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of all sequences in generation; 0: as many as fit into memory."""
    vllm_url: str = ""
    vllm_api_key: SecretStr = SecretStr("")
    vllm_copies_bytes: int = Field(default=20_000_000_000, gt=0)
    """Maximum bytes of adapters copied out of an object store for the vLLM server."""

    @model_validator(mode="after")
    def _names_its_vllm(self) -> Self:
        if self.sampler == "vllm" and not self.vllm_url:
            raise ValueError("sampler=vllm needs vllm_url.")
        return self

    @model_validator(mode="after")
    def _quantizes_where_it_can(self) -> Self:
        if self.quantization != "none" and self.group_size > 1:
            raise ValueError("quantization needs group_size=1: the parts of a group are not quantized.")
        if self.quantization != "none" and self.sampler == "vllm":
            raise ValueError("quantization needs sampler=engine: a vLLM server would sample from other weights.")
        return self

    @property
    def adapter_copies_dir(self) -> Path:
        """Folder of this worker's adapters copied out of an object store."""
        return self.data_dir / "vllm" / self.worker_id

    @property
    def batch_sizes_path(self) -> Path:
        """File with the measured sizes of micro-batches."""
        return self.data_dir / "micro_batches.json"

    @property
    def recorder_dir(self) -> Path:
        """Folder of recorded cycles, with a subfolder per pool and worker."""
        return self.data_dir / "recorder"

    @property
    def model_name(self) -> str:
        """Served name of the base model, used by clients."""
        return self.base_model.partition("=")[0]

    @property
    def model_source(self) -> str:
        """Hub id or folder of the weights."""
        name, _, source = self.base_model.partition("=")
        return source or name


def pool_of(base_model: str) -> PoolId:
    """Return the pool id of a base model: readable, and unique even if two names differ only in a slash."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", base_model).strip("-")[-40:]
    return PoolId(f"{readable}-{sha256(base_model.encode()).hexdigest()[:8]}")
