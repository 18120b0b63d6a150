"""Construction of a worker: the engine, the pool record and the worker loop."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from cotrain_store.disk.model_folder import why_not_served
from cotrain_store.disk.spool import Spool
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import WeightsRef, WorkerId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import SyncConnection
from cotrain_store.sampling.claims import SampleClaims
from cotrain_store.sampling.token_stream import TokenPublisher
from cotrain_store.settings import WorkerSettings, pool_of
from cotrain_store.weights import SavedWeights
from cotrain_workers.checkpoints.files import CheckpointFiles
from cotrain_workers.checkpoints.peft_folder import key_of
from cotrain_workers.checkpoints.weights_store import UNSTORED_BYTES, WeightsStore
from cotrain_workers.engine.device import DeviceUnfit, check_cuda, is_out_of_memory
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.host import free_host_bytes
from cotrain_workers.engine.model.model_source import ModelTooLarge, NoModel, model_too_large, report
from cotrain_workers.engine.ops import Create, Datum, HostWeights, OptimStep, Pass
from cotrain_workers.engine.spec import AdapterSpec, lora_widths
from cotrain_workers.engine.training.memory_model import ENOUGH_TOKENS
from cotrain_workers.group.engine import GroupEngine, WorkerEngine
from cotrain_workers.group.lock_step import GroupLockStep, follow
from cotrain_workers.group.processes import Links
from cotrain_workers.group.sharded_base import load_sharded
from cotrain_workers.recorder.recorder import Recorder
from cotrain_workers.recovery.recovery_copies import ReplayCost, SnapshotPolicy
from cotrain_workers.recovery.run_lifecycle import RunLifecycle
from cotrain_workers.sampling.service import Decoder, NoDecoder, SamplingService
from cotrain_workers.sampling.tokenizer import PublishedTokenizer
from cotrain_workers.sampling.vllm.adapters import AdapterCopies
from cotrain_workers.sampling.vllm.client import VllmServer
from cotrain_workers.sampling.vllm.decoder import Adapter, VllmDecoder, VllmSampler
from cotrain_workers.worker.loop import WorkerLoop

log = structlog.get_logger()


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": None}
#: Tokens of the probe batch. One sequence saturates a CPU; 1,000 tokens of a larger model would
#: take it a minute.
_PROBE_TOKENS = {"cpu": 256, "cuda": 1024}
#: A host with this folder has a GPU and its driver. Containers with the NVIDIA container toolkit see it.
NVIDIA_DRIVER = Path("/proc/driver/nvidia")
#: Length of the shortest pass: fewer tokens are padded to it.
SHORTEST_TOKENS = 16
#: Version of the choice of a micro-batch size (`memory_model.py`). Stored sizes of other versions are not used.
_SIZING = "by time, with images"


@dataclass(frozen=True)
class Tuning:
    """Parameters without an operator setting. Tests and benchmarks pass other values."""

    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    unstored_memory_bytes: int = UNSTORED_BYTES


def device_of(settings: WorkerSettings, driver: Path = NVIDIA_DRIVER) -> str:
    """Return the configured device; for "auto", "cuda" if a GPU can be used, else "cpu".

    Raises DeviceUnfit if "cuda" is configured and no GPU can be used. With "auto" and a driver, the reason is logged.
    """
    if settings.device == "cpu":
        return "cpu"
    try:
        check_cuda()
    except DeviceUnfit as unfit:
        if settings.device == "cuda":
            raise
        if driver.exists():
            log.warning("gpu_unusable", reason=str(unfit), device="cpu")
        return "cpu"
    return "cuda"


def measured_engine(settings: WorkerSettings, device: str, links: Links | None = None) -> tuple[WorkerEngine, float]:
    """Load the engine and measure its throughput in tokens/s. With `links`, this process is the first of a group.

    Raises ModelTooLarge if memory is insufficient for either.
    """
    with _refusing_too_large(settings, device):
        engine: WorkerEngine
        if links is None:
            engine = load_engine(settings, device)
        else:
            lock_step = GroupLockStep(links)
            own = load_engine(settings, device, lock_step)
            engine = GroupEngine(own, lock_step)
        report("measuring how fast it trains")
        return engine, measure_throughput(engine, _PROBE_TOKENS[device])


def follow_first(settings: WorkerSettings, device: str, links: Links) -> None:
    """Load this member's part of the base model and execute the first member's messages until the group ends."""
    lock_step = GroupLockStep(links)
    with _refusing_too_large(settings, device):
        engine = load_engine(settings, device, lock_step)
    follow(engine, lock_step)


@contextmanager
def _refusing_too_large(settings: WorkerSettings, device: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            name = settings.base_model
            raise ModelTooLarge(f"Base model {name} cannot be served: {model_too_large(device=device)}") from error
        raise


def load_engine(settings: WorkerSettings, device: str, lock_step: GroupLockStep | None = None) -> Engine:
    """Load the engine; with `lock_step`, that of a group member.

    The micro-batch size is measured at most once per set of conditions. A group on a GPU measures none, because
    running out of memory would end it.
    """
    if reason := why_not_served(settings.model_source):
        raise NoModel(f"Base model {settings.model_source} cannot be served: {reason}")
    micro_batch_tokens = settings.micro_batch_tokens
    is_measured = micro_batch_tokens == "auto" and device == "cuda"
    size_key = _batch_size_key(settings, device)
    host_bytes = settings.host_bytes or free_host_bytes() // 2 // settings.workers_on_host
    more: dict[str, Any] = {"quantization": settings.quantization}
    if lock_step is not None:
        host_bytes //= lock_step.links.size
        load_base = partial(load_sharded, lock_step=lock_step)
        more = {"load_base": load_base, "recompute": "always" if device == "cuda" else "auto"}
        micro_batch_tokens = ENOUGH_TOKENS if is_measured else micro_batch_tokens
    elif micro_batch_tokens == "auto":
        micro_batch_tokens = known_batch_sizes(settings.batch_sizes_path).get(size_key) or "auto"
    engine = Engine.load(
        settings.model_source,
        device=device,
        dtype=_DTYPES[settings.dtype],
        micro_batch_tokens=micro_batch_tokens,
        adapter_bytes=settings.adapter_bytes or None,
        host_bytes=host_bytes,
        local_files_only=settings.offline,
        **more,
    )
    if is_measured and lock_step is None:
        remember_batch_size(settings.batch_sizes_path, size_key, engine.facts.numerics.micro_batch_tokens)
    return engine


def _batch_size_key(settings: WorkerSettings, device: str) -> str:
    """Return the cache key: every condition that the measured micro-batch size depends on."""
    hardware = torch.cuda.get_device_name() if device == "cuda" else device
    return " ".join(
        str(each)
        for each in (
            settings.model_source, hardware, settings.dtype, torch.__version__,
            settings.adapter_bytes, _SIZING,
            *({settings.quantization} - {"none"}),
        )
    )  # fmt: skip


def measure_throughput(engine: WorkerEngine, num_tokens: int) -> float:
    """Measure training throughput in tokens/s on one small batch. The first token budget is derived from it."""
    length = min(256, engine.facts.context_length)
    rng = np.random.default_rng(0)
    datums = [_datum(rng.integers(0, engine.facts.vocab_size, length)) for _ in range(max(1, num_tokens // length))]
    probe = Pass("probe", 1, datums, "cross_entropy", {}, needs_grad=True)
    _, taken = _seconds(engine, [probe, probe])
    return len(datums) * length / taken


def measure_replay_cost(engine: WorkerEngine) -> ReplayCost:
    """Measure the shortest pass and the shortest optimizer step of a run alone; the second of each counts."""
    datums = [_datum(np.zeros(SHORTEST_TOKENS, np.int64))]
    ops = [
        op
        for seq in (1, 3)
        for op in (
            Pass("probe", seq, datums, "cross_entropy", {}, needs_grad=True),
            OptimStep("probe", seq + 1, 1e-4, 0.9, 0.95, 1e-8, 0.0, 0.0),
        )
    ]
    return ReplayCost(*_seconds(engine, ops)[-2:])


def _datum(tokens: np.ndarray) -> Datum:
    return Datum(tokens, {"target_tokens": tokens, "weights": np.ones(len(tokens), np.float32)})


def _seconds(engine: WorkerEngine, ops: Sequence[Pass | OptimStep]) -> list[float]:
    """Return the time in s of each op of a new run `probe`, in a cycle of its own."""
    engine.run([Create("probe", 0, AdapterSpec(rank=8, seed=0))])
    taken = []
    for op in ops:
        began = time.perf_counter()
        engine.run([op])
        taken.append(time.perf_counter() - began)
    engine.adapters.drop("probe")
    return taken


def pool_record(settings: WorkerSettings, engine: WorkerEngine, device: str, tokens_per_s: float) -> PoolRecord:
    """Return the record of this pool: model, limits, device and throughput."""
    facts = engine.facts
    return PoolRecord(
        id=pool_of(settings.model_name),
        base_model=settings.model_name,
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        max_rank=min(settings.max_rank, facts.max_rank),
        num_parameters=facts.num_parameters,
        device=device,
        dtype="bfloat16" if device == "cuda" and settings.dtype == "auto" else settings.dtype,
        numerics_id=facts.numerics_id,
        tokens_per_s=tokens_per_s,
        lora_widths=lora_widths(engine.targets),
        tied_embeddings=facts.tied_embeddings,
        memory_tokens=facts.longest_datum,
        images=asdict(facts.images) if facts.images else {},
        expert_choices=facts.expert_choices,
    )


def enter_pool(
    engine: WorkerEngine,
    connection: SyncConnection,
    spools: tuple[Spool, Spool],
    record: PoolRecord,
    settings: WorkerSettings,
    tokenizer: PublishedTokenizer | None,
    tuning: Tuning,
    cost: ReplayCost,
) -> WorkerLoop:
    """Claim the worker id in the pool and return the worker loop. Open steps of a predecessor are re-executed.

    `spools` are of bodies and of results; `cost` is of a replay.
    """
    worker = WorkerId(settings.worker_id)
    execution = Execution(connection, *spools, record.id, worker)
    epoch = execution.claim()
    failpoint("worker.entered", worker)
    metrics = WorkerMetrics(record.base_model, worker)
    weights = WeightsStore(
        SavedWeights(connection, record.id, worker, epoch),
        CheckpointFiles(settings.blob_store, record.base_model),
        engine.adapters.layout_of,
        unstored_bytes=tuning.unstored_memory_bytes,
        orphan_age_s=settings.orphan_age_s,
        count_answered=partial(metrics.resolved, OpKind.SAVE),
    )
    make_decoder = decoder_factory(engine, settings, weights, tokenizer)
    decoder = make_decoder()
    execution.publish(
        replace(
            record,
            eos_token_ids=engine.facts.eos_token_ids,
            max_sequence_tokens=longest_sequence(decoder, record),
            sampler=settings.sampler,
        )
    )
    sampling = SampleClaims(connection, *spools, record.id, worker, epoch)
    sampling.requeue()
    sampler = SamplingService(
        decoder, make_decoder, sampling, weights, TokenPublisher(connection), engine.facts.eos_token_ids, metrics
    )
    recorder = Recorder(
        engine,
        weights,
        settings.recorder_dir / record.id / worker,
        pool=record.id,
        base_model=record.base_model,
        epoch=epoch,
        kept=settings.record_cycles,
    )
    policy = replace(tuning.snapshots, replay_s=settings.replay_backlog_s)
    runs = RunLifecycle(engine, execution, weights, settings, policy, metrics, cost)
    return WorkerLoop(engine, execution, runs, weights, sampler, recorder, record, settings, metrics)


def decoder_factory(
    engine: WorkerEngine, settings: WorkerSettings, weights: WeightsStore, tokenizer: PublishedTokenizer | None
) -> Callable[[], Decoder]:
    """Return a factory of decoders: the engine's own, a vLLM client, or none for a group without vLLM."""

    def host(key: str) -> HostWeights:
        return weights.host(WeightsRef(key))

    if settings.sampler == "engine":
        if not isinstance(engine, Engine):
            return NoDecoder
        kv_tokens = settings.kv_cache_tokens or None
        text, grammar_of = (tokenizer.text, tokenizer.grammar_of) if tokenizer else (None, None)
        return partial(engine.decoder, host, kv_tokens=kv_tokens, text=text, grammar_of=grammar_of)
    adapters, copies = settings.blob_store.below("weights"), None
    shared = adapters.folder or settings.adapter_copies_dir
    if adapters.folder is None:
        copies = AdapterCopies(adapters, shared, settings.vllm_copies_bytes, settings.model_name, weights.layout_of)

    def adapter_of(key: str) -> Adapter | None:
        record = weights.stored(WeightsRef(key))
        return Adapter(shared / key_of(record.digest), record.lora) if record else None

    def decoder() -> VllmDecoder:
        server = VllmServer(settings.vllm_url, settings.vllm_api_key.get_secret_value())
        sampler = VllmSampler(server, settings.model_name, engine.targets, shared, copies)
        return VllmDecoder(sampler, adapter_of)

    return decoder


def longest_sequence(decoder: Decoder, record: PoolRecord) -> int:
    """Return the maximum number of tokens of a prompt and its continuation together."""
    if isinstance(decoder, VllmDecoder | NoDecoder):
        return record.context_length  # vLLM rejects longer requests
    return decoder.max_sequence_tokens


def known_batch_sizes(path: Path) -> dict[str, int]:
    """Return the measured micro-batch sizes in tokens, by the conditions of the measurement.

    A restart on the same hardware must use the same size. A size changes the last bits of results, and two
    measurements may differ slightly.
    """
    try:
        found = json.loads(path.read_text())
        return {str(name): int(tokens) for name, tokens in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as broken:
        log.warning("batch_sizes_unreadable", path=str(path), reason=str(broken))
        return {}


def remember_batch_size(path: Path, size_key: str, tokens: int) -> None:
    """Write a size. Of two workers that write at the same time, one may lose its size and measure again."""
    known = {**known_batch_sizes(path), size_key: tokens}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    written.replace(path)
