"""A worker's settings."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Literal

from pydantic import Field

from cotrain_store.messages import PoolId
from cotrain_store.settings import StoreSettings


class WorkerSettings(StoreSettings):
    """What one worker serves and on what; every field is also a `COTRAIN_*` variable."""

    base_model: str
    """A hub id, a local folder, or `NAME=FOLDER` to serve a folder under another name."""
    worker_id: str = Field(default="w0", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    """Its place in the pool. A second process with the same id takes the place over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: float32 on the CPU, bfloat16 on CUDA."""
    torch_threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0 leaves torch its own choice. Part of what makes numbers repeat."""
    micro_batch_tokens: int = Field(default=8192, ge=256)
    """Tokens one pass of the base model holds at most."""
    max_rank: int = Field(default=128, ge=1, le=1024)
    offline: bool = False
    """Never ask a hub: the base model must be a folder or in the local cache."""
    snapshot_debt_s: float = Field(default=30.0, gt=0)
    """Take a recovery copy of a run once replaying its log would take this long."""
    snapshot_debt_ops: int = Field(default=512, ge=1)
    snapshot_debt_bytes: int = Field(default=256 * 1024**2, ge=1)
    snapshot_idle_s: float = Field(default=600.0, gt=0)
    """Take a recovery copy of a run that changed and then rested this long."""
    evict_idle_s: float = Field(default=1800.0, gt=0)
    """Drop a run that rested this long from memory; its next request brings it back."""

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
