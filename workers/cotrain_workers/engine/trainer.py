"""What the worker around an engine needs of it: met by `Engine`, and by a group of processes that are one worker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from cotrain_workers.engine.adapters.bank import AdapterState
from cotrain_workers.engine.cycle import Yielding
from cotrain_workers.engine.model_facts import ModelFacts
from cotrain_workers.engine.ops import CycleOutput, Op, UpcomingBatch
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target


class StateCopying(Protocol):
    """A run's state on its way."""

    def state(self) -> AdapterState:
        """Return the state once it has arrived; any thread may wait for it."""


class Adapters(Protocol):
    """The adapters of all runs in memory; see `AdapterBank`."""

    def __contains__(self, run: object) -> bool: ...

    def drop(self, run: str) -> None:
        """Forget a run's adapter."""

    def state(self, run: str) -> AdapterState:
        """Copy a run's adapter to the host."""

    def copy_out(self, run: str) -> StateCopying:
        """Begin to copy a run's adapter to the host."""

    def restore(self, run: str, state: AdapterState) -> Any:
        """Put a state in place of whatever this run held."""

    def prefetch(self, runs: Sequence[str]) -> None:
        """Begin to bring in what the next cycle needs."""

    def over_budget(self) -> list[str]:
        """Return the runs whose leaving frees the host memory that is too much."""

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return where the matrices of such an adapter lie."""

    @property
    def offloaded(self) -> int:
        """How many adapters are on the host alone."""

    @property
    def device_limit_bytes(self) -> int | None:
        """Return what adapters may take of the device."""

    @property
    def by_tier(self) -> dict[str, tuple[int, int]]:
        """Count adapters and their bytes."""


class Open(Protocol):
    """The passes that go on in a later cycle; see `OpenPasses`."""

    def __contains__(self, op_id: object) -> bool: ...

    @property
    def runs(self) -> Collection[str]:
        """Return the runs that have one."""


class ProcessUse(NamedTuple):
    """What one process of a worker holds."""

    runs: int
    memory_bytes: int
    """Resident."""


class Trainer(Protocol):
    """One base model and the adapters of all runs that train on it; see `Engine`."""

    @property
    def facts(self) -> ModelFacts:
        """What other processes may know."""

    @property
    def adapters(self) -> Adapters:
        """The adapters in memory."""

    @property
    def open_passes(self) -> Open:
        """The passes that are open."""

    @property
    def processes(self) -> Sequence[ProcessUse]:
        """Return what each process holds; of an engine there is one. Any thread may ask."""

    @property
    def targets(self) -> Sequence[Target]:
        """Return the modules that adapters can be attached to."""

    @property
    def halvings(self) -> int:
        """How many micro-batches did not fit into memory."""

    @property
    def safe_tokens(self) -> int:
        """Return how many tokens one pass of the base model has room for."""

    @property
    def device_memory(self) -> tuple[int, int]:
        """Return the bytes in use on the device, and all it has."""

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
        """Run each micro-batch of passes within `watch(batch)` from now on, where one process has all of it."""

    def spare_memory(self, tokens: int) -> None:
        """Take less host memory for micro-batches of this size."""

    def check_device(self) -> None:
        """Raise DeviceLost where nothing can be computed any more."""
