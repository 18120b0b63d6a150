"""Entry point of a worker process: `python -m cotrain_workers`."""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from cotrain_store.blobs.opening import claim_blobs
from cotrain_store.disk.spool import RESULTS, new_writer
from cotrain_store.errors import Fenced, StoreUnavailable, UnsafeRedis
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.metrics_port import metrics_port, own_metrics
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.logs import start_logs
from cotrain_store.monitoring.metrics import count_blob_failures
from cotrain_store.monitoring.worker_exits import record_silent_exit, recorded_exit
from cotrain_store.oplog.execution import latest_heartbeat
from cotrain_store.process_start import read_settings, refuse, trace_or_refuse
from cotrain_store.redis_client.connection import SyncConnection, check_store, open_sync_connection
from cotrain_store.settings import FIRST_FREE, WorkerSettings, pool_of
from cotrain_workers.engine.device import EXIT_CODE, DeviceLost, DeviceUnfit
from cotrain_workers.engine.host import use_cores
from cotrain_workers.engine.lora.backend import BackendUnfit
from cotrain_workers.engine.model.model_source import UnusableModel, listen, report
from cotrain_workers.engine.training.memory_model import TooLittleMemory
from cotrain_workers.group.engine import GroupEngine
from cotrain_workers.group.processes import Links, launch
from cotrain_workers.recovery.recovery_copies import SnapshotPolicy
from cotrain_workers.sampling.tokenizer import publish_tokenizer
from cotrain_workers.worker.bootstrap import (
    Tuning,
    device_of,
    enter_pool,
    follow_first,
    measure_replay_cost,
    measured_engine,
    pool_record,
)
from cotrain_workers.worker.membership import WorkerIdInUse, await_absence, claim_free_worker_id, lock_worker_id

log = structlog.get_logger()


def serve_as_member(settings: WorkerSettings, tuning: Tuning) -> int:
    """Run one process of a group: the first one is the worker, and the others follow its orders."""
    device = device_of(settings)
    use_cores(settings.torch_threads)
    links = Links(device, settings.group_timeout_s)
    if links.number == 0:
        try:
            return serve(settings, tuning, links)
        except DeviceLost:
            links.end_others()
            raise
    start_logs(f"member-{links.number}", settings.log_level)
    try:
        follow_first(settings, device, links)
    except UnusableModel:
        raise
    except Exception:
        log.exception("member_failed", member=links.number)
        links.end_others()
        sys.stdout.flush()
        os._exit(EXIT_CODE)  # an orderly end would wait for the others
    links.close()
    return 0


def serve(settings: WorkerSettings, tuning: Tuning, links: Links | None = None) -> int:
    """Load the base model and serve its pool until stopped; with `links`, for a group."""
    pool = pool_of(settings.model_name)
    connection = open_sync_connection(settings.redis_url)
    check_store(connection, accept_data_loss=settings.accept_data_loss)
    count_blob_failures(Source.WORKER)
    claim_blobs(connection, settings.data_dir, settings.blobs)
    worker = _claim_worker_id(settings, connection, pool)
    record_silent_exit(connection, settings.model_name, worker, latest_heartbeat(connection, pool, worker))
    with recorded_exit(connection, settings.model_name, worker):
        return _serve_as(settings.model_copy(update={"worker_id": worker}), tuning, connection, links)


def _serve_as(settings: WorkerSettings, tuning: Tuning, connection: SyncConnection, links: Links | None) -> int:
    """Serve the pool under a claimed worker id until stopped."""
    pool, worker = pool_of(settings.model_name), settings.worker_id
    start_logs(f"worker-{worker}", settings.log_level)
    trace_or_refuse("worker", worker)
    device = device_of(settings)
    use_cores(settings.torch_threads)
    engine, tokens_per_s = measured_engine(settings, device, links)
    tokenizer = publish_tokenizer(
        settings.model_source, pool, settings.blob_store.below("tokenizers"), local_files_only=settings.offline
    )
    record = pool_record(settings, engine, device, tokens_per_s)
    if tokenizer is None:
        report("it has no tokenizer: no stop strings, and no chat endpoints")
    else:
        record = replace(record, tokenizer=tokenizer.folder)
    writer = new_writer(settings.worker_id)
    spools = settings.open_spool(writer), settings.open_spool(RESULTS + writer)
    cost = measure_replay_cost(engine)
    loop = enter_pool(engine, connection, spools, record, settings, tokenizer, tuning, cost)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: loop.stop())
    log.info(
        "worker_started", pool=pool, worker=settings.worker_id, device=device,
        tokens_per_s=tokens_per_s,
    )  # fmt: skip
    try:
        with metrics_port(settings, own_metrics(Source.WORKER)):
            loop.run()
    except Fenced:
        log.warning("worker_fenced")
    else:
        log.info("worker_stopped")
    if isinstance(engine, GroupEngine) and links is not None:
        engine.followers.end()
        links.close()
    return 0


def _claim_worker_id(settings: WorkerSettings, connection: SyncConnection, pool: PoolId) -> WorkerId:
    """Claim a worker id until this process ends. Raise WorkerIdInUse if the configured id is in use."""
    folder, host = settings.data_dir / "run", socket.gethostname()
    heartbeat_of = partial(latest_heartbeat, connection, pool)
    if settings.worker_id == FIRST_FREE:
        return claim_free_worker_id(folder, pool, heartbeat_of, host)
    worker = WorkerId(settings.worker_id)
    lock_worker_id(folder, pool, worker)
    await_absence(partial(heartbeat_of, worker), host)
    return worker


def main() -> None:
    """Run the process. Exit with status 2 (`refusal.EXIT_CODE`) if a restart would not help."""
    start_logs("worker")
    tuning = _tuning()
    settings = read_settings(WorkerSettings)
    start_logs("worker", settings.log_level)
    listen(lambda doing: log.info("starting", doing=doing))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if settings.group_size > 1:
        sys.exit(launch(settings.group_size, partial(_exit_with, serve_as_member, settings, tuning)))
    _exit_with(serve, settings, tuning)


def _exit_with(work: Callable[[WorkerSettings, Tuning], int], settings: WorkerSettings, tuning: Tuning) -> None:
    """Do the work and exit with its status. Each expected error is one line of the log."""
    try:
        sys.exit(work(settings, tuning))
    except DeviceLost as lost:
        log.error("device_lost", reason=str(lost))  # no traceback: the reason is complete
        sys.stdout.flush()
        os._exit(EXIT_CODE)  # an orderly end would call the device
    except WorkerIdInUse as taken:
        refuse("worker_id_in_use", str(taken))
    except UnsafeRedis as unsafe:
        refuse("redis_refused", str(unsafe))
    except DeviceUnfit as unfit:
        refuse("device_refused", str(unfit))
    except UnusableModel as unusable:
        refuse("base_model_refused", str(unusable))
    except (BackendUnfit, TooLittleMemory) as reason:
        refuse("base_model_refused", f"Base model {settings.base_model} cannot be served: {reason}")
    except StoreUnavailable as unavailable:
        log.error("redis_unavailable", reason=str(unavailable))  # the supervisor starts this process again
        sys.exit(1)


def _tuning() -> Tuning:
    """Return the parameters that only tests set, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m cotrain_workers")
    policy = SnapshotPolicy()
    parser.add_argument(
        "--snapshot-ops", type=int, default=policy.ops,
        help="copy a run out once replaying it would run so many ops",
    )  # fmt: skip
    return Tuning(replace(policy, ops=parser.parse_args().snapshot_ops))


if __name__ == "__main__":
    main()
