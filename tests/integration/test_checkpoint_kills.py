"""Checkpoints and real processes that are killed: every confirmed save exists, bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.keys.run_keys import log
from cotrain_store.messages.ids import request_id
from cotrain_store.messages.runs import RunRecord
from cotrain_store.redis_client.connection import open_connection, open_sync_connection
from cotrain_store.results.futures import Futures, Pending
from cotrain_store.tenants.catalog import Catalog
from cotrain_store.weights.checkpoints import Checkpoints
from cotrain_workers.checkpoints.peft_folder import CONFIG
from cotrain_workers.engine.engine import Engine
from tests.support.checkpoints import checkpoint_of, run_from, submit_load, submit_state
from tests.support.processes import WORKER, Process, settings_of, stack_of
from tests.support.program import LORA, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, stack
from tests.support.waiting import until


@dataclass
class Host:
    """Every process of a server but the API, which the test replaces."""

    redis: EmbeddedRedis
    scheduler: Process
    worker: Process
    stack: Stack
    catalog: Catalog

    async def listed(self, run: RunRecord) -> list[str]:
        """Return the checkpoints in the lists."""
        found = await self.catalog.checkpoints(run.tenant, 0, 100)
        assert found.total_count == len(found.items)
        of_run = await self.catalog.checkpoints_of(run.tenant, run.id)
        assert list(of_run) == list(found.items)
        return [checkpoint.name for checkpoint in found.items]

    def done(self, run: RunRecord) -> int:
        """Return the last committed seq of a run."""
        with contextlib.closing(open_sync_connection(self.redis.url)) as redis:
            return int(redis.hget(log(POOL, run.id), "done") or -1)


@contextlib.asynccontextmanager
async def opened(redis: EmbeddedRedis, folder: Path, model: Path) -> AsyncIterator[Host]:
    settings = settings_of(redis.url, folder, model)
    shared = {name: settings[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
    connection, spool = open_connection(redis.url), Spool(folder / "spool", new_writer("api"))
    with (
        Process("cotrain_scheduler", shared, folder / "scheduler.log") as scheduler,
        Process(WORKER, settings, folder / "worker.log") as trainer,
    ):
        async with Futures(connection, spool) as futures:
            server = stack_of(connection, spool, futures)
            catalog = Catalog(connection, server.records, Checkpoints(connection))
            yield Host(redis, scheduler, trainer, server, catalog)
    spool.close()
    await connection.aclose()


@contextlib.contextmanager
def no_disk(folder: Path) -> Iterator[None]:
    """Make every write below a folder fail, in any process."""
    folder.mkdir(exist_ok=True)  # otherwise the first file in it would create it
    aside = folder.with_name(f"{folder.name}-aside")
    folder.rename(aside)
    folder.touch()
    yield
    folder.unlink()
    aside.rename(folder)


async def test_saves_resolve_after_a_kill_before_their_files_are_written(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """Kill before any file, and between the files of the adapter and of the optimizer; the disk is
    full until then."""
    with EmbeddedRedis() as redis:
        digests = {}
        for last in (STEP, 2 * STEP):
            async with stack(redis.url, tmp_path / "alone") as alone:
                _, digests[last] = await undisturbed(alone, redis.url, tmp_path / "alone", engine, last)
            redis.flush()
        async with opened(redis, tmp_path, tiny_model) as host:
            run = await host.stack.create("a", "a", LORA)
            await results(host.stack, run, await submit(host.stack, run, 1, STEP))
            with no_disk(tmp_path / "optimizers"):
                between = await submit_state(host.stack, run, STEP + 1, "between")
                await until(lambda: any((tmp_path / "weights").glob(f"??/*/{CONFIG}")))
                with no_disk(tmp_path / "weights"):
                    later = await submit(host.stack, run, STEP + 1, 2 * STEP, place=STEP + 2)
                    before = await submit_state(host.stack, run, 2 * STEP + 2, "before")
                    await results(host.stack, run, later)  # training needs no disk
                    await until(lambda: host.done(run) == 2 * STEP + 2)
                    for request in (between, before):
                        assert isinstance(await host.stack.futures.wait(run.tenant, request, 0), Pending)
                    assert await host.listed(run) == []
                    await asyncio.to_thread(host.worker.kill)
            host.worker.start()
            copies = []
            for request in (between, before):
                checkpoint = await checkpoint_of(host.stack, run, request)
                copies.append(await run_from(host.stack, "a", checkpoint.name, checkpoint))
            assert await host.listed(run) == ["before", "between"]
            for copy in copies:
                await host.stack.result(copy, request_id(copy.id, 0))
            await asyncio.to_thread(host.worker.stop)
        for copy, digest in zip(copies, digests.values(), strict=True):
            assert await asyncio.to_thread(restored_digest, redis.url, tmp_path, engine, copy.id) == digest


async def test_a_checkpoint_survives_a_kill_of_all_processes_bit_for_bit(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """Load into its own run and into a new one; compare log-probs, optimizer and the steps that
    follow."""
    with EmbeddedRedis() as redis:
        async with stack(redis.url, tmp_path / "alone") as alone:
            expected, digest = await undisturbed(alone, redis.url, tmp_path / "alone", engine, last=2 * STEP)
        redis.flush()
        async with opened(redis, tmp_path, tiny_model) as host:
            run = await host.stack.create("a", "a", LORA)
            await submit(host.stack, run, 1, STEP)
            kept = await submit_state(host.stack, run, STEP + 1, "kept")
            checkpoint = await checkpoint_of(host.stack, run, kept)
            requests = await submit(host.stack, run, 2 * STEP + 1, 3 * STEP, place=STEP + 2)
            await host.stack.result(run, requests[0])
            for process in (host.worker, host.scheduler, redis):
                await asyncio.to_thread(process.kill)
        redis.restart()
        async with opened(redis, tmp_path, tiny_model) as host:
            assert await host.listed(run) == ["kept"]
            new = await run_from(host.stack, "a", "new", checkpoint)
            await submit_load(host.stack, run, 2 * STEP + 2, checkpoint)
            for each, place in ((run, 2 * STEP + 3), (new, 1)):
                again = await submit(host.stack, each, STEP + 1, 2 * STEP, place=place)
                assert await results(host.stack, each, again) == expected[STEP:]
            await asyncio.to_thread(host.worker.stop)
            for each in (run, new):
                assert await asyncio.to_thread(restored_digest, redis.url, tmp_path, engine, each.id) == digest
