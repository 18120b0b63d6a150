"""Saves and loads that a kill interrupts: every confirmed save exists, and the run continues from the same bits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.errors import CheckpointNotFound
from cotrain_store.messages.ids import RequestId, request_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, RunState
from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_store.redis_keys import log
from cotrain_store.results.pending import Pending
from cotrain_store.tenants.catalog import Catalog
from cotrain_store.tenants.checkpoints import Checkpoints
from cotrain_workers.checkpoints.files import CheckpointFiles
from cotrain_workers.checkpoints.peft_folder import CONFIG
from cotrain_workers.checkpoints.weights_store import LOST
from cotrain_workers.engine.engine import Engine
from cotrain_workers.worker.bootstrap import Tuning
from tests.support.bodies import sequences
from tests.support.checkpoints import checkpoint_of, run_from, saved_state, submit_load, submit_state
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.processes import Process, scheduler_and_worker, settings_of
from tests.support.program import LORA, PROGRAM, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import base_sampler, ended, submit_sample
from tests.support.stack import POOL, Home, Stack, accepting, snapshots, stack, worker
from tests.support.waiting import PATIENCE_S, until

STEP = 4  # ops of one step of the program


async def train_and_save(server: Stack, engine: Engine, *, drains: bool = True) -> tuple[RunRecord, CheckpointRecord]:
    """Train and save one step, then train a second step that a load will undo.

    `drains` leaves a snapshot.
    """
    run = await server.create("a", "a", LORA)
    with worker(server, engine, drains=drains):
        await submit(server, run, 1, STEP)
        checkpoint = await saved_state(server, run, STEP + 1)
        requests = await submit(server, run, 2 * STEP + 1, 3 * STEP, place=STEP + 2)
        await results(server, run, requests)
    engine.adapters.drop(run.id)
    return run, checkpoint


def tokens_of(first: int, last: int) -> int:
    """Count the tokens of the program's requests first…last."""
    kinds = [(number, PROGRAM[number - 1]) for number in range(first, last + 1)]
    passes = [number for number, kind in kinds if kind is not OpKind.OPTIM_STEP]
    return sum(len(each) - 1 for number in passes for each in sequences(number, 2, 9))


async def go_back_and_on(server: Stack, run: RunRecord, checkpoint: CheckpointRecord) -> list[RequestId]:
    """Load over a pending gradient, then run the program's second step and save."""
    seq = 2 * STEP + 2
    await submit(server, run, 1, 1, place=seq)
    await submit_load(server, run, seq + 1, checkpoint)
    requests = await submit(server, run, STEP + 1, 2 * STEP, place=seq + 2)
    return [*requests, await submit_state(server, run, seq + 2 + STEP, "y")]


FAILPOINTS = [
    variant(Failpoint("bodies", 1)),
    Failpoint("commit", 1),
    variant(Failpoint("commit", 1, after=True)),
    variant(Failpoint("commit", 2)),
    Failpoint("commit", 2, after=True),
    variant(Failpoint("register_snapshot", 1, after=True)),
    Failpoint("mark_stored", 1, of_weights=True),
    variant(Failpoint("mark_stored", 1, after=True, of_weights=True)),
]


@pytest.mark.parametrize("failpoint", FAILPOINTS, ids=str)
async def test_a_run_resumes_from_a_checkpoint_wherever_its_worker_is_killed(
    server: Stack, engine: Engine, failpoint: Failpoint
) -> None:
    """The run and its next checkpoint end as if it had never trained the undone step."""
    expected, digest = await undisturbed(server, engine, last=2 * STEP)
    run, checkpoint = await train_and_save(server, engine)
    requests = await go_back_and_on(server, run, checkpoint)
    async with dying_worker(server, engine, failpoint, tuning=snapshots(ops=2)):
        pass
    engine.adapters.drop(run.id)
    with worker(server, engine, tuning=snapshots(ops=2)):
        assert await results(server, run, requests[:-1]) == expected[STEP:]
        saved = await checkpoint_of(server, run, requests[-1])
        other = await run_from(server, "a", "other", saved)
        await server.result(other, request_id(other.id, 0))
    assert restored_digest(server, engine, run.id) == digest
    assert restored_digest(server, engine, other.id) == digest


async def test_a_replay_starts_at_the_last_load_even_if_its_name_is_gone(
    server: Stack, engine: Engine, redis: Any
) -> None:
    """The weights of a load are kept until the log needs them no longer, also when the name is
    deleted."""
    run, checkpoint = await train_and_save(server, engine, drains=False)
    kept = redis_keys.weights(checkpoint.weights)
    requests = await go_back_and_on(server, run, checkpoint)
    async with dying_worker(server, engine, Failpoint("commit", 2, after=True)):
        pass
    engine.adapters.drop(run.id)
    redis.delete(redis_keys.checkpoint(run.id, "weights", "x"))
    with worker(server, engine) as loop:
        loop._weights.sweep()
        assert redis.exists(kept)
        last = await submit(server, run, 1, 1, place=3 * STEP + 5)
        await results(server, run, requests[:-1] + last)
        # Its creation, the load and the ops after it, except the forward; not the two steps before.
        assert 1 + STEP <= loop._runs.replayed_ops <= 2 + STEP
    # A log reaches back to the snapshot before the newest. Each worker drains a snapshot; once two
    # of them are behind the load, no replay starts with it.
    for place in (6, 7, 8):
        with worker(server, engine) as loop:
            await results(server, run, await submit(server, run, 1, 1, place=3 * STEP + place))
            loop._weights.sweep()
            if not redis.exists(kept):
                break
    assert not redis.exists(kept)


async def test_a_load_of_damaged_files_fails_alone_also_in_a_replay(
    server: Stack, tmp_path: Path, engine: Engine
) -> None:
    """The file is intact again when the log is replayed, but the load still counts as failed."""
    run, checkpoint = await train_and_save(server, engine)
    digest = restored_digest(server, engine, run.id)
    (file,) = (tmp_path / "optimizers").glob("??/*")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with worker(server, engine, drains=False):
        request = await submit_load(server, run, 2 * STEP + 2, checkpoint)
        failure = (await server.result(run, request)).json()
        message = f"Checkpoint {checkpoint.path} cannot be read on the server."
        assert failure == {"error": message, "category": "server"}
        assert engine.adapters.state(run.id).digest() == digest
    file.write_bytes(content)
    assert restored_digest(server, engine, run.id) == digest


async def test_a_run_whose_checkpoint_is_missing_in_a_replay_stops_alone(
    server: Stack, tmp_path: Path, engine: Engine
) -> None:
    run, checkpoint = await train_and_save(server, engine)
    neighbour = await server.create("b", "b", LORA)
    with worker(server, engine, drains=False):
        await submit(server, neighbour, 1, STEP)
        await server.result(run, await submit_load(server, run, 2 * STEP + 2, checkpoint))
        await server.result(neighbour, request_id(neighbour.id, STEP))
    for file in (tmp_path / "optimizers").glob("??/*"):
        file.unlink()
    for each in (run, neighbour):
        engine.adapters.drop(each.id)
    with worker(server, engine):
        last = await submit(server, run, 1, 1, place=2 * STEP + 3)
        assert (await results(server, run, last))[0]["category"] == "server"
        last = await submit(server, neighbour, STEP + 1, STEP + 1)
        assert isinstance((await results(server, neighbour, last))[0], bytes)
    assert (await server.records.run(run.tenant, run.id)).state is RunState.FAILED


async def test_a_named_save_is_redone_with_its_optimizer_after_a_kill(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a later load has undone the saved state in the run."""
    _, digest = await undisturbed(server, engine, last=2 * STEP)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, drains=False) as loop:
        await submit(server, run, 1, STEP)
        first = await saved_state(server, run, STEP + 1, "first")
    blocked, write = threading.Event(), CheckpointFiles.write

    def held(*args: Any) -> Any:
        blocked.wait(PATIENCE_S)
        return write(*args)

    with monkeypatch.context() as slow:
        slow.setattr(CheckpointFiles, "write", held)
        await submit(server, run, STEP + 1, 2 * STEP, place=STEP + 2)
        owed = await submit_state(server, run, 2 * STEP + 2, "owed")
        await submit_load(server, run, 2 * STEP + 3, first)
        await submit(server, run, 1, STEP, place=2 * STEP + 4)
        commit = Failpoint("commit", 2, after=True)
        async with dying_worker(server, engine, commit) as loop:
            pass
        loop._weights._writer.shutdown(wait=False, cancel_futures=True)
    blocked.set()
    engine.adapters.drop(run.id)
    with worker(server, engine):
        other = await run_from(server, "a", "other", await checkpoint_of(server, run, owed))
        await server.result(other, request_id(other.id, 0))
    assert engine.adapters.state(other.id).digest() == digest


async def test_a_save_that_no_replay_can_redo_fails_and_is_not_listed(
    server: Stack, engine: Engine, redis: Any
) -> None:
    run = await server.create("a", "a", LORA)
    await submit(server, run, 1, STEP)
    owed = await submit_state(server, run, STEP + 1)
    async with dying_worker(server, engine, Failpoint("mark_stored", of_weights=True)):
        pass
    engine.adapters.drop(run.id)
    redis.hdel(redis_keys.bodies(POOL, run.id), "1")
    with worker(server, engine):
        assert (await server.result(run, owed)).json() == {"error": LOST, "category": "server"}
    with pytest.raises(CheckpointNotFound):
        await server.records.checkpoint(run.tenant, f"tinker://{run.id}/weights/x")
    assert redis.zcard(redis_keys.tenant_checkpoints(run.tenant)) == 0
    assert (await server.records.run(run.tenant, run.id)).state is RunState.FAILED


async def test_a_full_disk_delays_runs_with_large_saves_and_fails_none(
    server: Stack, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("cotrain_workers.checkpoints.weights_store.RETRY_S", 0.01)
    run = await server.create("a", "a", LORA)
    with worker(server, engine, tuning=Tuning(unstored_memory_bytes=1)) as loop:
        with monkeypatch.context() as broken:
            broken.setattr("cotrain_workers.checkpoints.files.write_optimizer", full)
            await submit(server, run, 1, STEP)
            first = await submit_state(server, run, STEP + 1, "x")
            await submit(server, run, STEP + 1, 2 * STEP, place=STEP + 2)
            second = await submit_state(server, run, 2 * STEP + 2, "y")
            await until(lambda: not loop._backpressure.accepts_saves)
            neighbour = await server.create("b", "b", LORA)
            await results(server, neighbour, await submit(server, neighbour, 1, STEP))
            assert len(loop._weights._unstored) == 1
            sampler = await base_sampler(server)
            await ended(server, sampler, await submit_sample(server, sampler, 0))
            for save in (first, second):
                assert isinstance(await server.futures.wait(run.tenant, save, 0), Pending)
        assert (await checkpoint_of(server, run, first)).name == "x"
        assert (await checkpoint_of(server, run, second)).name == "y"


async def test_the_run_of_a_last_save_ends_when_it_is_stored_or_has_failed(server: Stack, engine: Engine) -> None:
    with worker(server, engine):
        stored = await server.create("a", "a", LORA)
        await saved_state(server, stored, 1, last=True)
        failed = await server.create("a", "b", LORA)
        request = await submit_state(server, failed, 1, age_recipients=("nobody",), last=True)
        assert (await server.result(failed, request)).json()["category"] == "user"
        for run in (stored, failed):
            assert (await server.records.run(run.tenant, run.id)).state is RunState.CLOSED


async def test_usage_is_counted_for_the_run_and_its_tenant(server: Stack, engine: Engine, redis: Any) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        await results(server, run, await submit(server, run, 1, STEP))
        await saved_state(server, run, STEP + 1)
    (hour,) = redis.scan_iter("cotrain:usage:a:*")
    used = {field.split(b"|")[0]: float(amount) for field, amount in redis.hgetall(hour).items()}
    assert used[b"training_tokens"] == tokens_of(1, STEP)
    assert used[b"device_s"] > 0
    assert used[b"checkpoints"] == 1


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
    with scheduler_and_worker(settings, folder) as (scheduler, trainer):
        async with accepting(redis.url, folder) as server:
            catalog = Catalog(server.connection, server.records, Checkpoints(server.connection))
            yield Host(redis, scheduler, trainer, server, catalog)


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
                _, digests[last] = await undisturbed(alone, engine, last)
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
            assert await asyncio.to_thread(restored_digest, Home(redis.url, tmp_path), engine, copy.id) == digest


async def test_a_checkpoint_survives_a_kill_of_all_processes_bit_for_bit(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """Load into its own run and into a new one; compare log-probs, optimizer and the steps that
    follow."""
    with EmbeddedRedis() as redis:
        async with stack(redis.url, tmp_path / "alone") as alone:
            expected, digest = await undisturbed(alone, engine, last=2 * STEP)
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
                assert await asyncio.to_thread(restored_digest, Home(redis.url, tmp_path), engine, each.id) == digest
