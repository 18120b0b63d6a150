"""Downloads over HTTP: files of one checkpoint by temporary links without a key, and tokenizers that no hub has."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pyrage
import pytest
from structlog.testing import capture_logs

from cotrain.transport.http import Transport
from cotrain.wire.runs import TOKENIZER_FILES
from cotrain_server.limits import TenantSlots
from cotrain_server.signed_tokens import LINK_LIFE_S, Link, Signer
from cotrain_store import redis_keys
from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.messages.ids import TenantId, WeightsRef, encode
from cotrain_store.messages.runs import external_folder
from tests.support.http_api import ALICE, BOB, POOL, Api, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.stand_in import FILES, StandIn, stand_in
from tests.support.talking import write_language

CONTENTS = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"weights" * 1_000}
SAVES = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
BAD_LINK = (403, "The link is invalid or has expired.")
GONE = (404, "Checkpoint not found.")


@pytest.fixture
def folder(api: Api) -> Path:
    """Write the files of a worker for every save of the stand-in."""
    digest = FILES[0]
    folder = api.services.settings.data_dir / "weights" / digest[:2] / digest
    folder.mkdir(parents=True)
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    (folder / SUMS).write_text(sums_of(CONTENTS))
    return folder


async def save(api: Api, worker: StandIn, kind: str = "external_weights", **fields: Any) -> tuple[str, str]:
    """Save as `a`. Return the checkpoint's URL and its weights."""
    run = fields.pop("run", None) or await api.new_run()
    body = {"model_id": run, "seq_id": 1, "path": "a", **fields}
    future = (await api.post(SAVES[kind], body)).json()
    await worker.run_log()
    assert "path" in (await api.post("retrieve_future", future)).json()
    return f"training_runs/{run}/checkpoints/{kind}/a", future["request_id"]


async def urls_of(api: Api, checkpoint: str, key: str = ALICE) -> dict[str, str]:
    answer = await api.get(f"{checkpoint}/external_weights_urls", key)
    assert answer.status_code == 200, answer.text
    urls: dict[str, str] = answer.json()["urls"]
    return urls


async def fetch(api: Api, url: str, **headers: str) -> httpx.Response:
    """Fetch without a key, as `urllib` does."""
    return await api.http.get(url, headers=headers)


def said(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["detail"]


@pytest.mark.parametrize("kind", SAVES)
async def test_every_file_of_a_checkpoint_can_be_fetched_without_a_key(
    api: Api, worker: StandIn, folder: Path, kind: str
) -> None:
    checkpoint, _ = await save(api, worker, kind)
    (folder / "secret").write_bytes(b"no file of a checkpoint")
    urls = await urls_of(api, checkpoint)
    assert urls.keys() == CONTENTS.keys()
    for name, url in urls.items():
        answer = await fetch(api, url)
        assert answer.content == CONTENTS[name]
        assert answer.headers["content-length"] == str(len(CONTENTS[name]))
        assert name in answer.headers["content-disposition"]


async def test_downloads_of_a_tenant_wait_only_for_its_own(api: Api, worker: StandIn, folder: Path) -> None:
    api.services.downloads = TenantSlots(at_once=1)
    checkpoint, _ = await save(api, worker, "weights")
    url = (await urls_of(api, checkpoint))["adapter_config.json"]
    tenant = (await api.services.tenants.authenticate(ALICE)).id
    async with api.services.downloads.of(TenantId("another")):
        assert (await fetch(api, url)).status_code == 200
    async with api.services.downloads.of(tenant):
        waits = asyncio.create_task(fetch(api, url))
        await asyncio.sleep(0.05)
        assert not waits.done()
    assert (await waits).status_code == 200

    await api.http.delete(f"/api/v1/{checkpoint}", headers={"X-API-Key": ALICE})
    assert (await fetch(api, url)).status_code == 404
    async with api.services.downloads.of(tenant):
        pass  # a rejected download holds no resources


@pytest.mark.parametrize("name", CONTENTS)
async def test_a_damaged_file_is_never_sent(api: Api, worker: StandIn, folder: Path, name: str) -> None:
    checkpoint, _ = await save(api, worker, "weights")
    urls = await urls_of(api, checkpoint)
    archive = (await api.get(f"{checkpoint}/archive")).headers["location"]
    for url in (urls[name], archive):
        assert (await fetch(api, url)).status_code == 200
    damaged = bytearray(CONTENTS[name])
    damaged[-1] ^= 1
    for content in (bytes(damaged), CONTENTS[name][:-1], b""):
        (folder / name).write_bytes(content)
        for url in (urls[name], archive):
            status, detail = said(await fetch(api, url))
            assert status == 404
            assert f"/weights/a: {name} is damaged. Save the checkpoint again" in detail
            assert said(await fetch(api, url, Range="bytes=0-0"))[0] == 404
    (other,) = CONTENTS.keys() - {name}
    assert (await fetch(api, urls[other])).content == CONTENTS[other]
    (folder / name).write_bytes(CONTENTS[name])
    assert (await fetch(api, urls[name])).content == CONTENTS[name]


@pytest.mark.parametrize("left", [None, "", "adapter_model.safetensors"])
async def test_files_without_valid_sums_are_not_sent_and_the_sums_are_named(
    api: Api, worker: StandIn, folder: Path, left: str | None
) -> None:
    checkpoint, _ = await save(api, worker, "weights")
    urls = await urls_of(api, checkpoint)
    archive = (await api.get(f"{checkpoint}/archive")).headers["location"]
    if left is None:
        (folder / SUMS).unlink()
        fault = "SHA256SUMS is missing"
    else:
        (folder / SUMS).write_text(sums_of({left: CONTENTS[left]} if left else {}))
        fault = "SHA256SUMS has no line for adapter_config.json"
    with capture_logs() as logs:
        for url in (urls["adapter_config.json"], archive):
            status, detail = said(await fetch(api, url))
            assert status == 404
            assert f"/weights/a: {fault}. Save the checkpoint again" in detail
    assert [(line["event"], line["reason"]) for line in logs if line["log_level"] == "error"] == [
        ("file_damaged", fault)
    ] * 2
    (folder / SUMS).write_text(sums_of(CONTENTS))
    assert (await fetch(api, archive)).status_code == 200


async def test_an_interrupted_download_resumes(api: Api, worker: StandIn, folder: Path) -> None:
    checkpoint, _ = await save(api, worker)
    url = (await urls_of(api, checkpoint))["adapter_model.safetensors"]
    answer = await fetch(api, url, range="bytes=6990-")
    assert (answer.status_code, answer.content) == (206, CONTENTS["adapter_model.safetensors"][6990:])


async def test_our_client_resumes_the_download_of_an_earlier_process(
    api: Api, worker: StandIn, folder: Path, tmp_path: Path
) -> None:
    checkpoint, _ = await save(api, worker)
    name = "adapter_model.safetensors"
    url = (await urls_of(api, checkpoint))[name]
    etag = (await fetch(api, url)).headers["etag"].strip('"')
    (tmp_path / f".{name}~{etag}.part").write_bytes(CONTENTS[name][:6000])
    heard: list[tuple[int, int]] = []
    transport = Transport("http://server", ALICE, network=httpx.ASGITransport(api.app))
    await transport.fetch(url, tmp_path / name, lambda *now: heard.append(now))
    await transport.close()
    assert heard == [(len(CONTENTS[name]), len(CONTENTS[name]))]
    assert (tmp_path / name).read_bytes() == CONTENTS[name]


async def test_links_contain_their_expiry(api: Api, worker: StandIn, folder: Path) -> None:
    checkpoint, _ = await save(api, worker)
    answer = (await api.get(f"{checkpoint}/external_weights_urls")).json()
    left_s = (datetime.fromisoformat(answer["expires"]) - datetime.now(UTC)).total_seconds()
    assert LINK_LIFE_S - 60 < left_s <= LINK_LIFE_S


async def test_an_encrypted_checkpoint_serves_only_encrypted_files(api: Api, worker: StandIn, folder: Path) -> None:
    reader = str(pyrage.x25519.Identity.generate().to_public())
    checkpoint, ref = await save(api, worker, age_encryption_recipients=[reader])
    encrypted = api.services.settings.data_dir / "external" / external_folder(WeightsRef(ref))
    encrypted.mkdir(parents=True)
    for name in CONTENTS:
        (encrypted / f"{name}.age").write_bytes(b"encrypted")
    sums = sums_of({f"{name}.age": b"encrypted" for name in CONTENTS})
    (encrypted / SUMS).write_text(sums)
    urls = await urls_of(api, checkpoint)
    assert urls.keys() == {f"{name}.age" for name in CONTENTS}
    for url in urls.values():
        assert (await fetch(api, url)).content == b"encrypted"
    (encrypted / SUMS).unlink()
    assert "SHA256SUMS is missing" in said(await fetch(api, url))[1]
    (encrypted / SUMS).write_text(sums)
    location = (await api.get(f"{checkpoint}/archive")).headers["location"]
    assert set(unpack(await fetch(api, location))) == {*urls, "checkpoint_complete"}
    read_in_run = {"model_id": ref.rpartition(":")[0], "seq_id": 2, "optimizer": False}
    path = f"tinker://{read_in_run['model_id']}/external_weights/a"
    future = (await api.post("load_weights", {**read_in_run, "path": path})).json()
    await worker.run_log()
    failed = (await api.post("retrieve_future", future)).json()
    assert failed["error"].startswith("Encrypted external_weights are for")


@pytest.mark.parametrize("kind", SAVES)
async def test_the_archive_of_older_sdks_is_a_redirect_to_a_tar(
    api: Api, worker: StandIn, folder: Path, kind: str
) -> None:
    checkpoint, _ = await save(api, worker, kind)
    answer = await api.get(f"{checkpoint}/archive")
    assert answer.status_code == 302
    expires = datetime.strptime(answer.headers["expires"], "%a, %d %b %Y %H:%M:%S GMT")
    assert 0 < expires.replace(tzinfo=UTC).timestamp() - time.time() <= LINK_LIFE_S
    archive = await fetch(api, answer.headers["location"])
    assert int(archive.headers["content-length"]) == len(archive.content)
    assert unpack(archive) == {**CONTENTS, "checkpoint_complete": b""}


def unpack(answer: httpx.Response) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        assert all(member.isreg() for member in tar.getmembers())
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name: file.read() for name, file in files.items() if file}


async def test_a_modified_link_is_rejected(api: Api, worker: StandIn, folder: Path) -> None:
    checkpoint, _ = await save(api, worker)
    urls = await urls_of(api, checkpoint)
    url = urls["adapter_config.json"]
    head, _, name = url.rpartition("/")
    base, _, token = head.rpartition("/")
    content, _, seal = token.partition(".")
    for wrong in (
        f"{head}/adapter_model.safetensors",
        f"{head}/checkpoint.tar",
        f"{head}/%2e%2e",
        f"{head}/..%2fadapter_config.json",
        f"{base}/{content}/{name}",
        f"{base}/{content}./{name}",
        f"{base}/{content}.{seal[::-1]}/{name}",
        f"{base}/{content[:-2]}AA.{seal}/{name}",
        f"{base}/%00/{name}",
        f"{base}/%EF%BC%8E.%FF/{name}",
        f"{base}/{'a' * 4_096}/{name}",
    ):
        answer = await fetch(api, wrong)
        assert said(answer) in {BAD_LINK, (404, "Not Found")}, wrong
    assert (await fetch(api, url)).status_code == 200


async def test_expired_and_foreign_links_are_rejected(api: Api, worker: StandIn, folder: Path) -> None:
    _, ref = await save(api, worker)
    tenant = (await api.services.tenants.authenticate(ALICE)).id
    run = ref.rpartition(":")[0]
    link = Link(
        tenant, f"tinker://{run}/external_weights/a", WeightsRef(ref), "adapter_config.json", int(time.time()) + 60
    )
    signer = api.services.signer
    other = Signer((b"x" * 32, b"y" * 32))
    for text, expected in [
        (signer.sign_link(link), None),
        (signer.sign_link(replace(link, expires_at=int(time.time()))), BAD_LINK),
        (other.sign_link(link), BAD_LINK),
        (signer.sign_link(replace(link, weights=WeightsRef(f"{run}:9"))), GONE),
        (signer.sign_link(replace(link, tenant=await bob(api))), GONE),
    ]:
        answer = await fetch(api, f"/api/v1/files/{text}/adapter_config.json")
        assert (answer.status_code == 200) if expected is None else (said(answer) == expected)


async def bob(api: Api) -> Any:
    return (await api.services.tenants.authenticate(BOB)).id


async def test_a_link_ends_with_its_checkpoint(api: Api, worker: StandIn, folder: Path) -> None:
    run = await api.new_run()
    checkpoint, _ = await save(api, worker, run=run)
    old = (await urls_of(api, checkpoint))["adapter_config.json"]
    await save(api, worker, run=run, seq_id=2)
    assert said(await fetch(api, old)) == GONE
    new = (await urls_of(api, checkpoint))["adapter_config.json"]
    assert (await fetch(api, new)).status_code == 200
    await api.http.delete(f"/api/v1/{checkpoint}", headers={"X-API-Key": ALICE})
    assert said(await fetch(api, new)) == GONE


async def test_a_readers_link_ends_when_the_checkpoint_is_unpublished(api: Api, worker: StandIn, folder: Path) -> None:
    checkpoint, _ = await save(api, worker)
    assert (await api.get(f"{checkpoint}/external_weights_urls", BOB)).status_code == 404
    await api.post(f"{checkpoint}/publish")
    url = (await urls_of(api, checkpoint, BOB))["adapter_config.json"]
    assert (await fetch(api, url)).status_code == 200
    await api.http.delete(f"/api/v1/{checkpoint}/publish", headers={"X-API-Key": ALICE})
    assert said(await fetch(api, url)) == GONE


async def test_symbolic_links_are_not_followed(api: Api, worker: StandIn, folder: Path) -> None:
    checkpoint, _ = await save(api, worker)
    secret = api.services.settings.data_dir / "secret"
    secret.write_bytes(b"secret")
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(secret)
    url = (await urls_of(api, checkpoint))["adapter_config.json"]
    assert said(await fetch(api, url)) == GONE
    location = (await api.get(f"{checkpoint}/archive")).headers["location"]
    assert said(await fetch(api, location)) == GONE


async def test_links_use_the_address_by_which_the_client_reached_the_server(empty_redis: EmbeddedRedis) -> None:
    public = {"public_url": "https://gpu.example/cotrain/"}
    for settings, base in [({}, "http://localhost/api"), (public, "https://gpu.example/cotrain/api")]:
        async with running_api(empty_redis.url, **settings) as api:
            with stand_in(api.services) as worker:
                checkpoint, _ = await save(api, worker)
                for url in (await urls_of(api, checkpoint)).values():
                    assert url.startswith(f"{base}/v1/files/")


QUESTION = f"tokenizers?base_model={quote(POOL.base_model)}"


async def test_a_tokenizer_is_sent_as_its_worker_wrote_it(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        data_dir = api.services.settings.data_dir
        write_language(data_dir)
        folder = data_dir / "tokenizers" / POOL.tokenizer
        (folder / "code.py").write_text("no data")
        files = (await api.get(QUESTION)).json()["files"]
        written = {path.name: path.read_text() for path in folder.iterdir()}
        assert files == {name: written[name] for name in TOKENIZER_FILES if name in written}
        assert len(files) == 3
        plain = {"X-API-Key": ALICE, "Accept-Encoding": "identity"}
        raw = await api.http.get(f"/api/v1/{QUESTION}", headers=plain)
        assert "content-encoding" not in raw.headers
        assert json.loads(raw.content)["files"] == files


async def test_a_missing_tokenizer_is_reported(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        none = await api.get(QUESTION)
        assert none.status_code == 400
        assert none.json()["detail"].startswith("tiny/model has no tokenizer here")
        other = await api.get("tokenizers?base_model=other")
        assert (other.status_code, other.json()["code"]) == (400, "base_model_not_served")
        assert (await api.get("tokenizers")).status_code == 422
        assert (await api.get(QUESTION, key="tml-nobody")).status_code == 401


async def tokenizer_id(api: Api, base_model: str) -> str:
    """Rename the base model. Return the id from which SDKs load its tokenizer."""
    renamed = encode(replace(POOL, base_model=base_model))
    await api.services.connection.hset(redis_keys.pools(), POOL.id, renamed)
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": {}}
    run = (await api.post("create_model", body)).json()["model_id"]
    info = (await api.post("get_info", {"model_id": run})).json()
    named: str = info["model_data"]["tokenizer_id"]
    return named


async def test_on_this_host_sdks_get_the_folder_of_a_tokenizer_without_a_hub(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        data_dir: Path = api.services.settings.data_dir
        assert await tokenizer_id(api, "mine") == "mine"  # no files were written
        write_language(data_dir)
        folder = str((data_dir / "tokenizers" / POOL.tokenizer).absolute())
        assert await tokenizer_id(api, "mine") == folder
        assert await tokenizer_id(api, "/models/mine") == folder
        assert await tokenizer_id(api, "org/mine") == "org/mine"
    async with running_api(empty_redis.url, "10.0.0.9") as api:
        write_language(api.services.settings.data_dir)
        assert await tokenizer_id(api, "mine") == "mine"
