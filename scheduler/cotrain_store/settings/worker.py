"""Settings of a worker."""

import re
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator

from cotrain_store.disk.orphan_ages import ORPHAN_AGE_S
from cotrain_store.messages.ids import PoolId
from cotrain_store.settings.store import StoreSettings

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
