"""Interface of an engine for the worker. `Engine` and a group of processes that act as one worker
implement it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.cycle import Yielding
from cotrain_workers.engine.model_facts import ModelFacts
from cotrain_workers.engine.ops import CycleOutput, Op, UpcomingBatch
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target


class StateCopying(Protocol):
    """Pending copy of a run's state."""

    def state(self) -> AdapterState:
        """Return the state once it has arrived; any thread may wait for it."""


class Adapters(Protocol):
    """The adapters of all runs in memory; see `AdapterBank`."""

    def __contains__(self, run: object) -> bool: ...

    def drop(self, run: str) -> None:
        """Remove a run's adapter."""

    def state(self, run: str) -> AdapterState:
        """Copy a run's adapter to the host."""

    def copy_out(self, run: str) -> StateCopying:
        """Start a copy of a run's adapter to the host."""

    def restore(self, run: str, state: AdapterState) -> Any:
        """Replace any adapter of this run by a state."""

    def prefetch(self, runs: Sequence[str]) -> None:
        """Start to bring in the adapters of the next cycle."""

    def runs_to_evict(self) -> list[str]:
        """Return the runs to evict so that host memory is within its limit."""

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return the positions of the matrices of such an adapter."""

    @property
    def offloaded(self) -> int:
        """Number of adapters on the host alone."""

    @property
    def device_limit_bytes(self) -> int | None:
        """Limit of the adapters on the device in bytes."""

    @property
    def by_tier(self) -> dict[str, tuple[int, int]]:
        """Number of adapters and their bytes, by tier."""


class Open(Protocol):
    """Passes that continue in a later cycle; see `OpenPasses`."""

    def __contains__(self, op_id: object) -> bool: ...

    @property
    def runs(self) -> Collection[str]:
        """Runs with an open pass."""


class ProcessUse(NamedTuple):
    """Resources of one process of a worker."""

    runs: int
    memory_bytes: int  # resident memory in bytes


class Trainer(Protocol):
    """One base model and the adapters of all runs that train on it; see `Engine`."""

    @property
    def facts(self) -> ModelFacts:
        """Facts for other processes."""

    @property
    def adapters(self) -> Adapters:
        """The adapters in memory."""

    @property
    def open_passes(self) -> Open:
        """Open passes."""

    @property
    def processes(self) -> Sequence[ProcessUse]:
        """Resources of each process; an engine has one. Any thread may read it."""

    @property
    def targets(self) -> Sequence[Target]:
        """Modules that adapters can be attached to."""

    @property
    def halvings(self) -> int:
        """Number of micro-batches that did not fit into memory."""

    @property
    def safe_tokens(self) -> int:
        """Number of tokens that fit into one pass of the base model."""

    @property
    def device_memory(self) -> tuple[int, int]:
        """Bytes in use on the device, and its total."""

    def run(self, ops: Sequence[Op]) -> CycleOutput:
        """Run one cycle to its end."""

    def cycle(
        self,
        ops: Sequence[Op],
        allowances: Mapping[tuple[str, int], int] = ...,
        is_over: Callable[[], bool] = ...,
    ) -> Yielding[CycleOutput]:
        """Run one cycle."""

    def watch_micro_batches(
        self, watch: Callable[[UpcomingBatch], AbstractContextManager[None]]
    ) -> None:
        """Run each micro-batch of passes within `watch(batch)` from now on, if one process runs all of it."""

    def spare_memory(self, tokens: int) -> None:
        """Use less host memory for micro-batches of this size."""

    def check_device(self) -> None:
        """Raise DeviceLost if the device can no longer compute."""
