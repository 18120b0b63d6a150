"""Uploads over HTTP: a foreign adapter becomes a checkpoint, and a malicious archive leaves no
trace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotrain_server.adapter_upload.pending_files import delete_expired
from cotrain_server.http import upload_body as uploads
from cotrain_server.signed_tokens import Link
from cotrain_store import redis_keys
from cotrain_store.bodies.adapter_bodies import SaveRequest, decode_import
from cotrain_store.messages.ids import RequestId, RunId, WeightsRef
from cotrain_store.messages.ops import OpKind, QueuedOp, Result
from cotrain_store.oplog.dispatch import Dispatch
from tests.support.http_api import ALICE, BOB, POOL, Api, running_api
from tests.support.operations import EXTERNAL
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import StandIn, stand_in
from tests.support.uploads import BOMBS, HOSTILE, adapter, config, q_proj, tar

GOOD = tar(adapter(), "w:gz")


async def upload(api: Api, content: Any = GOOD, key: str = ALICE, headers: Any = None, **query: Any) -> httpx.Response:
    whole = {"base_model": POOL.base_model, "name": "mine", **query}
    return await api.http.post(
        "/api/v1/training_runs/upload",
        content=content,
        params={name: value for name, value in whole.items() if value is not None},
        headers={"X-API-Key": key, **(headers or {})},
    )


async def new_session(api: Api, key: str = ALICE) -> str:
    session: str = (await api.post("create_session", {}, key)).json()["session_id"]
    return session


async def test_an_upload_becomes_an_import_and_a_checkpoint(api: Api) -> None:
    metadata = {"from": "elsewhere"}
    answer = await upload(api, ttl_seconds=3600, user_metadata=json.dumps(metadata))
    assert answer.status_code == 200, answer.text
    said = answer.json()
    run = RunId(said["model_id"])
    assert said["path"] == f"tinker://{run}/weights/mine"
    assert (said["import_request_id"], said["request_id"]) == (f"{run}:0", f"{run}:1")

    with stand_in(api.services) as worker:
        await worker.run_log()
    for request_id in (f"{run}:0", f"{run}:1"):
        assert (await api.post("retrieve_future", {"request_id": request_id})).status_code == 200
    checkpoint = await api.services.records.checkpoint(await tenant(api), said["path"])
    assert checkpoint.user_metadata == metadata
    assert checkpoint.expires_at is not None
    record = await api.services.records.run(checkpoint.tenant, run)
    assert (record.lora.rank, record.lora.train_attn, record.lora.train_mlp) == (4, True, False)


async def tenant(api: Api) -> Any:
    return (await api.services.tenants.authenticate(ALICE)).id


async def test_the_log_contains_the_data_that_the_worker_needs(api: Api) -> None:
    await upload(api)
    with stand_in(api.services) as worker:
        ops = await queued(api)
        bodies = worker.execution.bodies(ops)
    assert [op.kind for op in ops] == [OpKind.IMPORT, OpKind.SAVE]
    imported = decode_import(bodies[0] or b"")
    assert imported.tensors == q_proj()
    assert [module.scale for module in imported.modules] == [2.0]
    save = SaveRequest.parse(bodies[1] or b"")
    assert (save.name, save.kind, save.last) == ("mine", "weights", True)


async def queued(api: Api) -> list[QueuedOp]:
    dispatch = Dispatch(api.services.connection, "scheduler")
    await dispatch.lead()
    return [op for queue in await dispatch.ready(POOL.id) for op in queue.ops]


@pytest.mark.parametrize("when", ["waiting", "done"])
async def test_a_repeated_upload_is_the_same_upload(api: Api, when: str) -> None:
    place: dict[str, Any] = {"session_id": await new_session(api), "model_seq_id": 3}
    first = await upload(api, **place)
    with stand_in(api.services) as worker:
        if when == "done":
            await worker.run_log()
            run = await api.services.records.run(await tenant(api), first.json()["model_id"])
            await api.services.intake.close_run(run)
    assert (await upload(api, **place)).json() == first.json()
    other = await upload(api, tar(adapter(**{"adapter_config.json": config(lora_alpha=1)})), **place)
    assert other.status_code == 400


async def test_each_upload_without_a_session_is_a_separate_run(api: Api) -> None:
    runs = {(await upload(api)).json()["model_id"] for _ in range(3)}
    assert len(runs) == 3


REFUSED: dict[str, tuple[bytes, str]] = {
    "no archive": (
        b"hello" * 300,
        "The archive is truncated, damaged or not a tar. Unpack a zip and upload the folder.",
    ),
    "nothing": (b"", "The archive is truncated, damaged or not a tar. Unpack a zip and upload the folder."),
    "hostile": (tar({"../x": b"1", **adapter()}), "Archive contains a forbidden member: ../x."),
    "pickle": (
        tar({"adapter_model.bin": b"1", "adapter_config.json": config()}),
        "Only safetensors checkpoints are accepted.",
    ),
    "no tensors": (tar({"adapter_config.json": config()}), "has no adapter_model.safetensors"),
    "other shape": (tar(adapter(**{"adapter_config.json": config(r=8)})), "has rank [4]"),
    "DoRA": (tar(adapter(**{"adapter_config.json": config(use_dora=True)})), "use_dora"),
    "high rank": (
        tar({"adapter_config.json": config(r=129), "adapter_model.safetensors": q_proj(129)}),
        "rank must be between 1 and 128.",
    ),
}


@pytest.mark.parametrize(("content", "detail"), REFUSED.values(), ids=REFUSED)
async def test_an_invalid_adapter_is_rejected_at_once_and_leaves_no_run(api: Api, content: bytes, detail: str) -> None:
    answer = await upload(api, content)
    assert answer.status_code == 400
    assert detail in answer.json()["detail"]
    assert not await queued(api)
    assert not (await api.get("sessions")).json()["sessions"]
    assert not any((api.services.settings.data_dir / "uploads").iterdir())


async def test_hostile_archives_are_rejected_and_write_only_to_the_data_folder(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, max_upload_bytes=2**20) as api:
        data = api.services.settings.data_dir
        before = set(data.rglob("*"))
        with written_files() as written:
            for name, archive in (HOSTILE | BOMBS).items():
                answer = await upload(api, archive)
                assert answer.status_code in (400, 413), name
        assert set(data.rglob("*")) - before == {data / "uploads"}
        assert written == {data / "uploads"}  # the folder of unnamed temporary files


@contextlib.contextmanager
def written_files() -> Iterator[set[Path]]:
    """Record every path that this process opens for writing, creates, renames or links."""
    written: set[Path] = set()
    WRITERS.append(written)
    try:
        yield written
    finally:
        WRITERS.remove(written)


WRITERS: list[set[Path]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if not WRITERS:
        return
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        WRITERS[-1].add(Path(os.fsdecode(arguments[0])).absolute())
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        paths = arguments[:1] if event == "os.mkdir" else arguments[:2]
        WRITERS[-1].update(Path(os.fsdecode(path)).absolute() for path in paths)


sys.addaudithook(_note)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"base_model": "other/model"}, 400),
        ({"base_model": None}, 422),
        ({"name": None}, 422),
        ({"name": "../x"}, 400),
        ({"name": "a" * 129}, 400),
        ({"ttl_seconds": 5}, 400),
        ({"ttl_seconds": "soon"}, 422),
        ({"user_metadata": "[]"}, 400),
        ({"user_metadata": '{"a": 1}'}, 400),
        ({"user_metadata": "{"}, 400),
        ({"session_id": "x" * 32}, 400),
        ({"model_seq_id": 1}, 400),
        ({"session_id": "x" * 32, "model_seq_id": 1}, 404),
        ({"session_id": "x" * 32, "model_seq_id": -1}, 422),
    ],
)
async def test_an_invalid_query_is_rejected_before_the_body_is_read(api: Api, query: dict[str, Any], code: int) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"x"
        raise AssertionError("somebody reads on")

    answer = await upload(api, GOOD if code == 200 else endless(), **query)
    assert answer.status_code == code, answer.text


async def test_a_finished_session_rejects_uploads(api: Api) -> None:
    session = await new_session(api)
    await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert (await upload(api, session_id=session, model_seq_id=0)).status_code == 410


async def test_an_upload_over_the_limit_is_rejected_in_every_format(empty_redis: EmbeddedRedis) -> None:
    async def undeclared() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1024)

    bomb = tar({"adapter_model.safetensors": bytes(2**22)}, "w:gz")
    async with running_api(empty_redis.url, max_upload_bytes=32 * 1024) as api:
        for content in (bytes(64 * 1024), undeclared(), bomb):
            answer = await upload(api, content)
            assert answer.status_code == 413
            assert "exceeds 0.03125 MiB" in answer.json()["detail"]
        gzipped = {"Content-Encoding": "gzip"}
        assert (await upload(api, headers=gzipped)).status_code == 415


async def test_a_client_that_stops_sending_is_disconnected(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield GOOD[:10]
        await asyncio.Event().wait()

    monkeypatch.setattr(uploads, "SILENCE_S", 0.01)
    assert (await upload(api, silent())).status_code == 408


async def test_concurrent_uploads_are_limited_per_tenant(api: Api) -> None:
    arriving, exclude_paused = asyncio.Semaphore(0), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield GOOD[:10]
        arriving.release()
        await exclude_paused.wait()
        yield GOOD[10:]

    slow_ones = [asyncio.create_task(upload(api, slow())) for _ in range(2)]
    for _ in slow_ones:
        await arriving.acquire()
    refused = await upload(api)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert (await upload(api, key=BOB)).status_code == 200
    exclude_paused.set()
    assert [(await each).status_code for each in slow_ones] == [200, 200]
    assert (await upload(api)).status_code == 200


async def test_a_full_quota_rejects_at_once(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"checkpoints": 1}) as api:
        assert (await upload(api)).status_code == 200
        with stand_in(api.services) as worker:
            await worker.run_log()
        answer = await upload(api)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("Checkpoint storage quota reached (1 checkpoints).")


async def test_a_queue_with_space_for_half_an_upload_leaves_no_run(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, quotas={"ops": 1}) as api:
        answer = await upload(api)
        assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
        assert (await api.get("training_runs")).json()["training_runs"] == []
        assert await queued(api) == []


async def upload_as_mint_does(api: Api, content: bytes, worker: StandIn | None) -> httpx.Response:
    """POST the form of MinT's quickstart while the worker runs the queued ops."""
    files = {"file": ("step-100.tar.gz", content, "application/gzip")}
    headers = {"X-API-Key": ALICE}
    posting = asyncio.create_task(api.http.post("/api/v1/checkpoints/upload", files=files, headers=headers))
    while worker and not posting.done():
        await worker.run_log()
        await asyncio.sleep(0.01)
    return await posting


async def test_a_mint_form_is_answered_after_its_checkpoint_exists(api: Api) -> None:
    named = config(base_model_name_or_path=POOL.base_model)
    with stand_in(api.services) as worker:
        answer = await upload_as_mint_does(api, tar(adapter(**{"adapter_config.json": named}), "w:gz"), worker)
    assert answer.status_code == 200, answer.text
    (path,) = answer.json().values()
    checkpoint = await api.services.records.checkpoint(await tenant(api), path)
    assert path == checkpoint.path
    info = await api.post("weights_info", {"tinker_path": path})
    assert (info.json()["base_model"], info.json()["lora_rank"]) == (POOL.base_model, 4)


async def test_a_form_without_a_valid_adapter_is_rejected_by_name(api: Api) -> None:
    for content, says in (
        (b"no archive", "archive"),
        (tar(adapter(**{"adapter_config.json": config(peft_type="IA3")})), "peft_type"),
    ):
        answer = await upload_as_mint_does(api, content, None)
        assert answer.status_code == 400
        assert says in answer.json()["detail"]
    plain = await api.http.post("/api/v1/checkpoints/upload", content=GOOD, headers={"X-API-Key": ALICE})
    assert plain.status_code == 415


async def test_a_form_with_an_adapter_of_another_base_model_gets_the_reason(api: Api) -> None:
    posting = asyncio.create_task(upload_as_mint_does(api, GOOD, None))
    redis, runs = api.services.connection, redis_keys.tenant_runs(await tenant(api))
    while not (queued := await redis.smembers(runs)):  # noqa: ASYNC110  # it has to be asked
        await asyncio.sleep(0.01)
    first = RequestId(f"{queued.pop().decode()}:0")
    failed = Result.failed("q_proj has another shape", "user")
    await redis.set(redis_keys.result(first), failed.encode())
    while not posting.done():
        await redis.publish(redis_keys.notify_results(), first)
        await asyncio.sleep(0.01)
    answer = await posting
    assert (answer.status_code, answer.json()["detail"]) == (400, "q_proj has another shape")


async def start(api: Api, key: str = ALICE, **changes: Any) -> Any:
    return (await api.post("external_weights_upload_start", EXTERNAL | changes, key)).json()


async def finish(api: Api, started: Any, key: str = ALICE) -> httpx.Response:
    wanted = {"upload_id": started["upload_id"]}
    return await api.post("external_weights_upload_finish", wanted, key)


async def put_files(api: Api, started: Any, **changes: bytes) -> None:
    for file, content in adapter(**changes).items():
        assert (await api.http.put(started["urls"][file], content=content)).status_code == 200


def pending(api: Api) -> set[Path]:
    folder = api.services.settings.data_dir / "pending_uploads"
    return {path for path in folder.rglob("*") if path.is_file()}


async def test_files_sent_by_links_become_a_checkpoint_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_server.routes.uploads.FINISH_PATIENCE_S", 0.0)
    started = await start(api, destination_project_id="p")
    assert set(started["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    absent = await finish(api, started)
    assert absent.status_code == 400
    assert "no adapter_config.json and adapter_model.safetensors" in absent.text
    await put_files(api, started)
    assert (await finish(api, started, BOB)).status_code == 404
    assert (await finish(api, {"upload_id": started["upload_id"] + "x"})).status_code == 404
    queued_only = await finish(api, started)
    assert queued_only.status_code == 503  # no engine yet
    assert not pending(api)
    with stand_in(api.services) as worker:
        await worker.run_log()
    path = (await finish(api, started)).json()["tinker_path"]
    assert (await finish(api, started)).json() == {"tinker_path": path}
    checkpoint = await api.services.records.checkpoint(await tenant(api), path)
    session = (await api.get(f"sessions/{checkpoint.run.partition(':')[0]}")).json()
    assert session["training_run_ids"] == [checkpoint.run]
    found = {"project_ids": ["p"]}
    listed = (await api.post("checkpoints/search", found)).json()["checkpoints"]
    assert [each["tinker_path"] for each in listed] == [path]


UNFIT: dict[str, tuple[dict[str, bytes], str]] = {
    "other rank": (
        {"adapter_config.json": config(r=8), "adapter_model.safetensors": q_proj(8)},
        "lora_config differs from the files, which have rank=8, train_attn=True, train_mlp=False",
    ),
    "no PEFT": ({"adapter_config.json": b"{}"}, "adapter_config.json: peft_type"),
    "no safetensors": ({"adapter_model.safetensors": b"short"}, "adapter_model.safetensors"),
}


@pytest.mark.parametrize(("files", "detail"), UNFIT.values(), ids=UNFIT)
async def test_unfit_files_are_rejected_at_the_finish_and_leave_no_run(
    api: Api, files: dict[str, bytes], detail: str
) -> None:
    started = await start(api)
    await put_files(api, started, **files)
    answer = await finish(api, started)
    assert (answer.status_code, detail in answer.json()["detail"]) == (400, True), answer.text
    assert not await queued(api)
    assert not (await api.get("sessions")).json()["sessions"]


async def test_links_have_limits_by_file_and_tenant_and_expire(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, max_upload_bytes=32 * 1024) as api:
        urls = (first := await start(api))["urls"]
        for file, limit in (("adapter_config.json", 1), ("adapter_model.safetensors", 0.03125)):
            answer = await api.http.put(urls[file], content=bytes(2**20 + 1))
            assert answer.status_code == 413
            assert answer.json()["detail"] == f"{file} exceeds {limit:g} MiB."
        crossed = urls["adapter_config.json"].replace("adapter_config.json", "evil")
        assert (await api.http.put(crossed, content=b"{}")).status_code == 403
        assert not pending(api)

        await put_files(api, first)
        for _ in range(3):
            await put_files(api, await start(api))
        full = await api.http.put((await start(api))["urls"]["adapter_config.json"], content=b"{}")
        assert (full.status_code, "4 unfinished uploads" in full.text) == (429, True)
        await put_files(api, await start(api, BOB))
        await put_files(api, first)  # replaced

        blobs = api.services.settings.blob_store
        delete_expired(blobs, time.time())
        assert len(pending(api)) == 10
        upload = api.services.signer.read_upload(first["upload_id"], await tenant(api))
        delete_expired(blobs, upload.expires_at + 60)
        assert not pending(api)
        past = api.services.signer.sign_upload(replace(upload, expires_at=1))
        assert (await finish(api, {"upload_id": past})).status_code == 404
        link = Link(upload.tenant, "upload-of:1-x", WeightsRef(""), "adapter_config.json", 1)
        late = f"/api/v1/uploads/{api.services.signer.sign_link(link)}/adapter_config.json"
        assert (await api.http.put(late, content=b"{}")).status_code == 403
