"""What a worker says about itself in every heartbeat. Only looks at what others count, from the heartbeat's thread."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_workers.worker.device_time import Duty

if TYPE_CHECKING:
    from cotrain_store.messages.pools import PoolRecord
    from cotrain_store.oplog.execution import Execution
    from cotrain_workers.checkpoints.backpressure import SaveBackpressure
    from cotrain_workers.checkpoints.weights_store import WeightsStore
    from cotrain_workers.engine.trainer import Trainer
    from cotrain_workers.recovery.resident_runs import ResidentRuns
    from cotrain_workers.recovery.run_lifecycle import RunLifecycle
    from cotrain_workers.sampling.service import SamplingService
    from cotrain_workers.worker.device_time import DeviceTime
    from cotrain_workers.worker.drain import Drain
    from cotrain_workers.worker.throughput import Throughput


class WorkerReport:
    """Gathers a heartbeat."""

    backpressure: SaveBackpressure
    """To be set before the first heartbeat: it sends some."""

    def __init__(
        self,
        execution: Execution,
        engine: Trainer,
        record: PoolRecord,
        residents: ResidentRuns,
        weights: WeightsStore,
        sampler: SamplingService,
        runs: RunLifecycle,
        throughput: Throughput,
        device_time: DeviceTime,
        drain: Drain,
    ) -> None:
        self._execution = execution
        self._engine = engine
        self._record = record
        self._residents = residents
        self._weights = weights
        self._sampler = sampler
        self._runs = runs
        self._throughput = throughput
        self._device_time = device_time
        self._drain = drain
        self._duty = Duty()

    def describe(self) -> WorkerHeartbeat:
        """Say how this worker is now; raises what a lost connection raises."""
        self._drain.look()
        engine = self._engine
        seconds = self._device_time.seconds
        memory_bytes, memory_limit_bytes = engine.device_memory
        adapters = engine.adapters.by_tier
        snapshot_age_s, snapshot_due_s = self._residents.snapshot_age
        processes = engine.processes
        return WorkerHeartbeat(
            id=self._execution.worker,
            epoch=self._execution.epoch,
            state=self._drain.state,
            hands_over=self._drain.hands_over or self._drain.leaves,
            device=self._record.device,
            tokens_per_s=self._throughput.tokens_per_s(engine.safe_tokens),
            runs=self._residents.runs,
            parked_runs=engine.adapters.offloaded,
            takes_saves=self.backpressure.takes_saves,
            memory_bytes=sum(process.memory_bytes for process in processes),
            seen_at=time.time(),
            restored_ops=self._runs.replayed_ops,
            samples_running=self._sampler.running,
            sample_tokens_per_s=self._sampler.tokens_per_s,
            samples_waiting=self._sampler.waiting,
            safe_tokens=engine.safe_tokens,
            halvings=engine.halvings,
            lora=engine.facts.numerics.lora,
            lora_fallback=engine.facts.lora_fallback,
            host=socket.gethostname(),
            device_seconds=seconds,
            duty=self._duty.shares(seconds, time.monotonic()),
            device_memory_bytes=memory_bytes,
            device_memory_limit_bytes=memory_limit_bytes,
            kv_cache_ratio=self._sampler.kv_cache_ratio,
            adapters={tier: count for tier, (count, _) in adapters.items()},
            adapter_bytes={tier: size for tier, (_, size) in adapters.items()},
            adapter_limit_bytes=engine.adapters.device_limit_bytes or 0,
            unstored_bytes=self._weights.unstored_bytes,
            snapshot_age_s=snapshot_age_s,
            snapshot_due_s=snapshot_due_s,
            members=[process._asdict() for process in processes] if len(processes) > 1 else [],
        )
