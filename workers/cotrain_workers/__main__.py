"""Run a worker: `python -m cotrain_workers`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np
import structlog
import torch

from cotrain_store.disk.folder_claim import claim_folder
from cotrain_store.disk.spool import RESULTS, Spool, new_writer
from cotrain_store.errors import Fenced, StoreUnavailable, UnsafeRedis
from cotrain_store.messages.ids import WorkerId
from cotrain_store.messages.pools import PoolRecord
from cotrain_store.monitoring.logs import start_logs
from cotrain_store.oplog.execution import beat_at
from cotrain_store.redis_client.connection import check_store_sync, open_sync_connection
from cotrain_store.refusal import read_settings, refuse
from cotrain_store.settings.worker import WorkerSettings, pool_of
from cotrain_workers.engine.device import EXIT_CODE, DeviceLost
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.host_memory import free_host_bytes
from cotrain_workers.engine.lora.backend import BackendUnfit
from cotrain_workers.engine.memory import is_out_of_memory
from cotrain_workers.engine.model.model_source import NoRoom, UnusableModel, no_room
from cotrain_workers.engine.ops import Create, Datum, Pass
from cotrain_workers.engine.progress import listen, tell
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.memory_model import TooLittleMemory
from cotrain_workers.worker.batch_size_cache import KnownSizes
from cotrain_workers.worker.bootstrap import enter_pool
from cotrain_workers.worker.instance_lock import PlaceTaken, await_absence, take_place
from cotrain_workers.worker.tokenizer import publish_tokenizer

log = structlog.get_logger()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": None}
_PROBE_TOKENS = 1024


def serve(settings: WorkerSettings) -> int:
    """Load the base model and serve its pool until told to stop."""
    pool, worker = pool_of(settings.model_name), WorkerId(settings.worker_id)
    take_place(settings.data_dir / "run", pool, worker)
    connection = open_sync_connection(settings.redis_url)
    check_store_sync(connection, accept_data_loss=settings.accept_data_loss)
    claim_folder(connection, settings.data_dir)
    await_absence(partial(beat_at, connection, pool, worker), socket.gethostname())
    device = _device(settings)
    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    engine, tokens_per_s = _measured_engine(settings, device)
    tokenizer = publish_tokenizer(
        settings.model_source, pool, settings.tokenizers_dir, local_files_only=settings.offline
    )
    record = _pool_record(settings, engine, device, tokens_per_s)
    if tokenizer is None:
        tell("it has no tokenizer: no stop strings, and no chat endpoints")
    else:
        record = replace(record, tokenizer=tokenizer.folder)
    writer = new_writer(settings.worker_id)
    spools = Spool(settings.spool_dir, writer), Spool(settings.spool_dir, RESULTS + writer)
    text = tokenizer.text if tokenizer else None
    loop = enter_pool(engine, connection, spools, record, settings, text)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: loop.stop())
    log.info(
        "worker_started", pool=pool, worker=settings.worker_id, device=device,
        tokens_per_s=tokens_per_s,
    )  # fmt: skip
    try:
        loop.run()
    except Fenced:
        log.warning("worker_fenced")
        return 0
    except DeviceLost as lost:
        log.error("device_lost", reason=str(lost))  # all there is to it is in its name
        sys.stdout.flush()
        os._exit(EXIT_CODE)  # an orderly end would call the device
    log.info("worker_stopped")
    return 0


def load_engine(settings: WorkerSettings, device: str) -> Engine:
    """Load the engine; a size of micro-batches that is measured is measured once."""
    asked, known = settings.micro_batch_tokens, KnownSizes(settings.known_sizes_path)
    circumstances = _circumstances(settings, device)
    engine = Engine.load(
        settings.model_source,
        device=device,
        dtype=_DTYPES[settings.dtype],
        micro_batch_tokens=(known.tokens(circumstances) if asked == "auto" else None) or asked,
        recompute=settings.recompute,
        lora_backend=settings.lora_backend,
        fusion=settings.fusion,
        adapter_bytes=settings.adapter_bytes or None,
        host_bytes=settings.host_bytes or free_host_bytes() // 2,
        local_files_only=settings.offline,
    )
    if asked == "auto" and device == "cuda":
        known.remember(circumstances, engine.facts.numerics.micro_batch_tokens)
    return engine


def _measured_engine(settings: WorkerSettings, device: str) -> tuple[Engine, float]:
    """Load the engine and train one small batch; raises NoRoom where memory is too small for either."""
    try:
        engine = load_engine(settings, device)
        tell("measuring how fast it trains")
        return engine, measure_throughput(engine)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            name = settings.base_model
            raise NoRoom(f"Base model {name} cannot be served: {no_room()}") from error
        raise


def _circumstances(settings: WorkerSettings, device: str) -> str:
    """Name all that the measured size of a micro-batch depends on."""
    hardware = torch.cuda.get_device_name() if device == "cuda" else device
    return " ".join(
        str(each)
        for each in (
            settings.model_source, hardware, settings.dtype, torch.__version__,
            settings.adapter_bytes, settings.recompute, settings.lora_backend,
            settings.fusion,
        )
    )  # fmt: skip


def measure_throughput(engine: Engine) -> float:
    """Measure training tokens/s on one small batch: the first token budget comes from it."""
    length = min(256, engine.facts.context_length)
    count = max(1, _PROBE_TOKENS // length)
    rng = np.random.default_rng(0)
    datums = []
    for _ in range(count):
        tokens = rng.integers(0, engine.facts.vocab_size, length)
        weights = np.ones(length, np.float32)
        datums.append(Datum(tokens, {"target_tokens": tokens, "weights": weights}))
    engine.run([Create("probe", 0, AdapterSpec(rank=8, seed=0))])
    probe = Pass("probe", 1, datums, "cross_entropy", {}, needs_grad=True)
    engine.run([probe])
    began = time.perf_counter()
    engine.run([probe])
    elapsed = time.perf_counter() - began
    engine.drop("probe")
    return count * length / elapsed


def _pool_record(
    settings: WorkerSettings, engine: Engine, device: str, tokens_per_s: float
) -> PoolRecord:
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
    )


def _device(settings: WorkerSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Start the process; exit status 2 (`refusal.EXIT_CODE`) where starting it again would not help."""
    start_logs("worker")
    settings = read_settings(WorkerSettings)
    start_logs(f"worker-{settings.worker_id}", settings.log_level)
    listen(lambda doing: log.info("starting", doing=doing))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        sys.exit(serve(settings))
    except PlaceTaken as taken:
        refuse("place_taken", str(taken))
    except UnsafeRedis as unsafe:
        refuse("redis_refused", str(unsafe))
    except UnusableModel as unusable:
        refuse("base_model_refused", str(unusable))
    except (BackendUnfit, TooLittleMemory) as unfit:
        refuse("base_model_refused", f"Base model {settings.base_model} cannot be served: {unfit}")
    except StoreUnavailable:
        log.error("redis_away")  # whoever started this process starts it again
        sys.exit(1)


if __name__ == "__main__":
    main()
