"""A worker's settings."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from cotrain_store.disk.orphan_ages import ORPHAN_AGE_S
from cotrain_store.messages.ids import PoolId
from cotrain_store.settings.store import StoreSettings

#: A worker id that is to be found.
FIRST_FREE = "auto"


class WorkerSettings(StoreSettings):
    """What one worker serves and on what; every field is also a `COTRAIN_*` variable."""

    base_model: str
    """A hub id, a local folder, or `NAME=FOLDER` to serve a folder under another name."""
    worker_id: str = Field(default=FIRST_FREE, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Its name in the pool. A second process with the same id does not start while the first one lives.
    `auto`: the first of w0, w1, … that no living process has."""
    workers_on_host: int = Field(default=1, ge=1)
    """How many workers share this host's memory; `cotrain serve` and `cotrain worker` say so to theirs."""
    group_size: int = Field(default=1, ge=1, le=64)
    """Processes that hold the base model together, a part each, as one worker; 1: this one holds all of it."""
    group_timeout_s: float = Field(default=300.0, gt=0)
    """How long the processes of a group wait for one another, at most: then one of them hangs, and all end."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: float32 on the CPU, bfloat16 on CUDA."""
    torch_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 leaves torch its own choice. Part of what makes numbers repeat."""
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=256)] = "auto"
    """Tokens one pass of the base model holds at most. `auto`: 2,048 on the CPU; on CUDA what memory
    allows, measured once and written down."""
    adapter_bytes: int = Field(default=0, ge=0)
    """Device memory for adapters; 0: a share of a GPU, no limit on a CPU. Runs at rest are offloaded to
    host memory when it is full, so that it does not limit how many there may be."""
    host_bytes: int = Field(default=0, ge=0)
    """Host memory for adapters at rest; 0: half of what is free at the start, of several workers on a host
    its part of that. Above it, those used least recently leave for the disk."""
    max_rank: int = Field(default=128, ge=1, le=1024)
    offline: bool = False
    """Never ask a hub: the base model must be a folder or in the local cache."""
    replay_backlog_s: float = Field(default=30.0, gt=0)
    """Take a recovery copy of a run once replaying its log would take this long."""
    orphan_age_s: float = Field(default=ORPHAN_AGE_S, ge=0)
    """Remove a file once this process has seen for so long that nothing refers to it."""
    record_cycles: int = Field(default=0, ge=0)
    """Keep the last so many cycles whole, to run them again with `cotrain replay`; 0 records none."""
    stop_grace_s: float = Field(default=60.0, gt=0)
    """Time between SIGTERM and SIGKILL: what the drain of a worker is planned by."""
    sampler: Literal["engine", "vllm"] = "engine"
    """What generates tokens: this process, sharing its time with training, or a vLLM server."""
    sampling_share: float = Field(default=0.5, ge=0, le=0.9)
    """The part of the processor that sampling may use while there is training to do."""
    kv_cache_tokens: int = Field(default=0, ge=0)
    """Tokens that all sequences being generated can hold in memory; 0 takes what there is room for."""
    vllm_url: str = ""
    vllm_api_key: SecretStr = SecretStr("")
    vllm_copies_bytes: int = Field(default=20_000_000_000, gt=0)
    """Of adapters that are copied out of an object store for the vLLM server to read."""

    @model_validator(mode="after")
    def _names_its_vllm(self) -> Self:
        if self.sampler == "vllm" and not self.vllm_url:
            raise ValueError("sampler=vllm needs vllm_url.")
        return self

    @property
    def adapter_copies_dir(self) -> Path:
        """Adapters that were copied out of an object store, of each worker in a folder of its own."""
        return self.data_dir / "vllm" / self.worker_id

    @property
    def batch_sizes_path(self) -> Path:
        """What was measured of micro-batches."""
        return self.data_dir / "micro_batches.json"

    @property
    def recorder_dir(self) -> Path:
        """Recorded cycles, of each worker in a folder of its own."""
        return self.data_dir / "recorder"

    @property
    def model_name(self) -> str:
        """The name clients ask for."""
        return self.base_model.partition("=")[0]

    @property
    def model_source(self) -> str:
        """Where the weights are read from."""
        name, _, source = self.base_model.partition("=")
        return source or name


def pool_of(base_model: str) -> PoolId:
    """Name the pool of a base model: readable, and unique even where names differ in a slash."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", base_model).strip("-")[-40:]
    return PoolId(f"{readable}-{sha256(base_model.encode()).hexdigest()[:8]}")
