"""Put a worker together: an engine, its pool, and all that stands between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import WeightsRef, WorkerId
from cotrain_store.oplog.execution import Execution
from cotrain_store.sampling.claims import Sampling
from cotrain_store.sampling.token_stream import TokenPublisher
from cotrain_store.weights.saved_weights import SavedWeights
from cotrain_workers.checkpoints.files import CheckpointFiles
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.recorder.recorder import Recorder
from cotrain_workers.recovery.resident_runs import Keeper
from cotrain_workers.sampling.service import SamplingService
from cotrain_workers.sampling.vllm.decoder import VllmDecoder
from cotrain_workers.worker.loop import WorkerLoop
from cotrain_workers.worker.share import Share

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cotrain_store.disk.spool import Spool
    from cotrain_store.messages.pools import PoolRecord
    from cotrain_store.redis_client.connection import SyncConnection
    from cotrain_store.settings.worker import WorkerSettings
    from cotrain_workers.engine.decoding.decoder import EngineDecoder
    from cotrain_workers.engine.decoding.requests import HostWeights, TextOf
    from cotrain_workers.engine.engine import Engine


def enter_pool(
    engine: Engine,
    connection: SyncConnection,
    spools: tuple[Spool, Spool],
    record: PoolRecord,
    settings: WorkerSettings,
    text: TextOf | None,
) -> WorkerLoop:
    """Take this worker's place in its pool; what a predecessor ran is run again.

    `spools` are of bodies and of results; `text` decodes tokens, for stop strings.
    """
    # Made below, once there is an epoch; no decoder asks for weights before its first step.
    weights: WeightsStore

    def host(key: str) -> HostWeights:
        return weights.host(WeightsRef(key))

    def folder(key: str) -> Path | None:
        return weights.path(WeightsRef(key))

    def make_decoder() -> EngineDecoder | VllmDecoder:
        if settings.sampler == "vllm":
            return vllm_decoder(engine, settings, folder)
        return engine.decoder(host, kv_tokens=settings.kv_cache_tokens or None, text=text)

    decoder = make_decoder()
    worker = WorkerId(settings.worker_id)
    execution = Execution(connection, *spools, record.id, worker)
    execution.enter(
        replace(
            record,
            eos_token_ids=engine.facts.eos_token_ids,
            max_sequence_tokens=longest_sequence(decoder, record),
            sampler=settings.sampler,
        )
    )
    failpoint("worker.entered", worker)
    sampling = Sampling(connection, *spools, record.id, worker, execution.epoch)
    sampling.requeue()
    weights = WeightsStore(
        SavedWeights(connection, record.id, worker, execution.epoch),
        CheckpointFiles.below(settings.data_dir, record.base_model),
        engine.layout_of,
        settings.weights_memory_bytes,
        settings.owed_memory_bytes,
        settings.orphan_age_s,
    )
    sampler = SamplingService(
        decoder,
        make_decoder,
        sampling,
        weights,
        TokenPublisher(connection),
        engine.facts.eos_token_ids,
    )
    return WorkerLoop(
        engine,
        execution,
        Keeper(engine, execution, weights, settings, exact=record.device == "cpu"),
        weights,
        sampler,
        Share(settings.sampling_share),
        Recorder(
            engine,
            weights,
            settings.recorder_dir / record.id / worker,
            pool=record.id,
            base_model=record.base_model,
            epoch=execution.epoch,
            kept=settings.record_cycles,
        ),
        base_model=record.base_model,
        device=record.device,
        tokens_per_s=record.tokens_per_s,
        grace_s=settings.stop_grace_s,
    )


def vllm_decoder(
    engine: Engine, settings: WorkerSettings, folder: Callable[[str], Path | None]
) -> VllmDecoder:
    """Make the decoder that asks a vLLM server."""
    return VllmDecoder(
        settings.vllm_url,
        api_key=settings.vllm_api_key.get_secret_value(),
        base_model=settings.model_name,
        targets=engine.targets,
        vocab_size=engine.facts.vocab_size,
        shared=settings.weights_dir,
        folder=folder,
    )


def longest_sequence(decoder: EngineDecoder | VllmDecoder, record: PoolRecord) -> int:
    """Count the tokens that a prompt and its continuation may have together."""
    if isinstance(decoder, VllmDecoder):
        return record.context_length  # the server's own limit is told to whoever exceeds it
    return decoder.max_sequence_tokens
