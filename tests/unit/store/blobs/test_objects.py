"""Object store that fails: requests are retried later, and no object counts as lost."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from cotrain_server.errors import Invalid
from cotrain_server.http.downloads import file_download, open_files, tar_download
from cotrain_server.settings import ServerSettings
from cotrain_server.text_apis.tokenizer_cache import language_of
from cotrain_store.blobs import opening
from cotrain_store.blobs.folder import passes
from cotrain_store.blobs.objects import FAILURES
from cotrain_store.blobs.opening import MARK, check_url, claim_blobs, open_blobs
from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable
from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.disk.object_spool import ObjectSpool
from cotrain_store.disk.spool import SpoolRef
from cotrain_store.errors import CheckpointNotFound, Reason, SpoolCorrupt, StoreUnavailable, UnsafeRedis
from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_workers.sampling.tokenizer import publish_tokenizer
from tests.support.http_api import POOL
from tests.support.object_store import BadNetwork, SeaweedFS
from tests.support.processes import ended, settings_of
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.tiny_models import build_tiny_qwen3

Open = Callable[..., Blobs]

PATH = "tinker://s:train:0/weights/a"


@pytest.fixture
def opened(object_store: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open the store as the processes do, through any endpoint, with shorter timeouts."""
    monkeypatch.setattr(opening, "_CLIENT", {**opening._CLIENT, "read_timeout": "300ms"})
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=1)}
    monkeypatch.setattr(opening, "_RETRIES", retries)

    def opened(endpoint: str = "", url: str = "", **variables: str) -> Blobs:
        for name, value in object_store.variables(endpoint, **variables).items():
            monkeypatch.setenv(name, value)
        opening._objects.cache_clear()
        return open_blobs(url or object_store.new_prefix(), tmp_path)

    return opened


@pytest.fixture
def network(object_store: SeaweedFS) -> Iterator[BadNetwork]:
    with BadNetwork(object_store.port) as network:
        yield network


@pytest.mark.parametrize("fault", ["refuse", "stall", "cut", "away"])
def test_a_failing_store_is_unavailable_and_loses_nothing(
    opened: Open, network: BadNetwork, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    monkeypatch.setattr(FAILURES, "count", counted.append)
    blobs = opened(network.endpoint)
    blobs.put(MARK, b"a Redis")
    blobs.put("a/kept", b"x" * 200_000)
    with network.failing(fault):
        for ask in (
            lambda: blobs.get("a/kept"),
            lambda: blobs.get("a/kept", (5, 9)),
            lambda: blobs.get("a/missing"),
            lambda: blobs.exists("a/kept"),
            lambda: blobs.put("a/new", b"y"),
            lambda: list(blobs.list("a")),
        ):
            with pytest.raises(BlobsUnavailable) as failed:
                ask()
            assert passes(failed.value)
            assert not failed.value.is_refusal
    assert network.struck
    assert counted == ["get", "get", "get", "get", "put", "list"]
    assert blobs.get("a/kept") == b"x" * 200_000
    blobs.put("a/new", b"y")
    assert [blob.key for blob in blobs.list("a")] == ["a/kept", "a/new"]


def test_a_missing_bucket_is_unavailable_and_not_empty(opened: Open) -> None:
    for url in ("s3://nothing-here/prefix", "s3://bucket/nothing-here"):
        with pytest.raises(BlobsUnavailable, match="belongs-to"):
            opened(url=url).get("snapshots/x")


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("s3://nothing-here/prefix", {}),
        ("s3://bucket/x", {"AWS_SECRET_ACCESS_KEY": "wrong"}),
        ("s3://bucket/x", {"AWS_ACCESS_KEY_ID": "wrong"}),
    ],
)
def test_a_wrong_bucket_or_credentials_are_refused_in_one_sentence(
    opened: Open, empty_redis: EmbeddedRedis, tmp_path: Path, url: str, variables: dict[str, str]
) -> None:
    opened(url=url, **variables)
    with (
        open_sync_connection(empty_redis.url) as redis,
        pytest.raises(UnsafeRedis, match=f"^COTRAIN_BLOBS: {url} cannot be used: .*bucket.*credentials"),
    ):
        claim_blobs(redis, tmp_path, url)


def test_a_store_that_does_not_answer_yet_can_be_claimed_later(
    opened: Open, network: BadNetwork, empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    opened(network.endpoint)
    with open_sync_connection(empty_redis.url) as redis:
        with network.failing("away"), pytest.raises(StoreUnavailable, match="COTRAIN_BLOBS"):
            claim_blobs(redis, tmp_path, "s3://bucket/claimed-late")
        claim_blobs(redis, tmp_path, "s3://bucket/claimed-late")
        claim_blobs(redis, tmp_path, "s3://bucket/claimed-late")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/data", "begins with none of"),
        ("http://store/bucket", "begins with none of"),
        ("file://data", "names no folder"),
        ("s3:///prefix", "is not s3://bucket/prefix"),
        ("s3://key:secret@bucket/prefix", "credentials are variables"),
    ],
)
def test_an_invalid_address_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_url(url)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ValueError, match=r"needs what `pip install 'cotrain\[objects\]'` installs"):
        check_url("s3://bucket/prefix")


def test_a_folder_can_be_given_as_a_url(tmp_path: Path) -> None:
    check_url(f"file://{tmp_path}/a%20b")
    assert open_blobs(f"file://{tmp_path}/a%20b", tmp_path).folder == tmp_path / "a b"


def test_concurrent_bodies_are_stored_in_one_object(opened: Open, tmp_path: Path) -> None:
    blobs = opened()
    blobs.put(MARK, b"a Redis")
    spool = ObjectSpool(blobs.below("spool"), "w", tmp_path)
    bodies = [b"%d" % number * 20_000 for number in range(40)]
    refs = [durable.result(60) for durable in [spool.put(body) for body in bodies]]
    segments = {SpoolRef.parse(ref).segment for ref in refs}
    assert segments == {blob.key for blob in blobs.below("spool").list()}
    assert len(segments) < 10
    reader = ObjectSpool(blobs.below("spool"), "another", tmp_path)
    assert [reader.read(ref) for ref in refs] == bodies == reader.read_each(refs)
    gone = str(SpoolRef("w-gone", 0, 3, "0" * 32))
    assert reader.read_each([refs[0], gone, refs[1]]) == [bodies[0], None, bodies[1]]
    torn = SpoolRef.parse(refs[0])
    for wrong in (
        SpoolRef(torn.segment, torn.offset + 1, torn.length, torn.digest),
        SpoolRef(torn.segment, 10**9, torn.length, torn.digest),
        SpoolRef("w-gone", 0, 3, torn.digest),
    ):
        with pytest.raises(SpoolCorrupt):
            reader.read(str(wrong))
    spool.close()
    reader.close()


def test_a_body_that_the_store_rejects_is_refused_and_the_next_accepted(
    opened: Open, network: BadNetwork, tmp_path: Path
) -> None:
    blobs = opened(network.endpoint)
    blobs.put(MARK, b"a Redis")
    spool = ObjectSpool(blobs.below("spool"), "w", tmp_path)
    with network.failing("refuse"):
        assert isinstance(spool.put(b"x").exception(60), BlobsUnavailable)
    ref = spool.put(b"y").result(60)
    with network.failing("cut"), pytest.raises(BlobsUnavailable):
        spool.read(ref)
    assert spool.read(ref) == b"y"
    spool.close()


async def test_an_object_is_sent_whole_in_ranges_and_in_a_tar(opened: Open) -> None:
    blobs = opened()
    blobs.put(MARK, b"a Redis")
    large = bytes(range(256)) * 20_000
    adapter = blobs.below("weights/ab/abc")
    contents = {"small.json": b"{}", "large.bin": large}
    for name, content in contents.items():
        adapter.put(name, content)
    with refused(Reason.CHECKPOINT_DAMAGED, match="SHA256SUMS is missing"):
        await open_files(adapter, ["large.bin"], PATH)
    adapter.put(SUMS, sums_of(contents).encode())

    async def sent(range_: str | None) -> httpx.Response:
        [file] = await open_files(adapter, ["large.bin"], PATH)
        transport = httpx.ASGITransport(file_download(file, {"range": range_} if range_ else {}))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.get("/")

    whole, part, rest, none = [await sent(range_) for range_ in (None, "bytes=5-9", "bytes=5000000-", "bytes=9000000-")]
    assert (whole.status_code, whole.content) == (200, large) == (none.status_code, none.content)
    assert (part.status_code, part.content) == (206, large[5:10])
    assert part.headers["content-range"] == f"bytes 5-9/{len(large)}"
    assert (rest.status_code, rest.content) == (206, large[5_000_000:])
    files = await open_files(adapter, ["small.json", "large.bin"], PATH)
    transport = httpx.ASGITransport(tar_download(files, "a.tar", 0.0))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        answer = await http.get("/")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        member = tar.extractfile("large.bin")
        assert member
        assert member.read() == large
    with pytest.raises(CheckpointNotFound):
        await open_files(adapter, ["missing"], PATH)


async def test_a_download_from_a_failing_store_is_not_reported_as_deleted(opened: Open, network: BadNetwork) -> None:
    blobs = opened(network.endpoint)
    with network.failing("refuse"), pytest.raises(StoreUnavailable, match="cannot be read now"):
        await open_files(blobs, ["x"], PATH)


async def test_a_tokenizer_is_read_from_the_store_once(
    object_store: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_store.variables().items():
        monkeypatch.setenv(name, value)
    url = object_store.new_prefix()
    settings = ServerSettings(redis_url="unix:///nowhere", data_dir=tmp_path / "api", blobs=url)
    settings.blob_store.put(MARK, b"a Redis")
    source = build_tiny_qwen3(tmp_path / "model")
    made = publish_tokenizer(str(source), "tiny-1", settings.blob_store.below("tokenizers"), local_files_only=True)
    assert made
    pool = replace(POOL, tokenizer=made.folder)
    language = await language_of(pool, settings)
    for blob in list(settings.blob_store.list("tokenizers")):
        settings.blob_store.delete(blob.key)
    assert await language_of(pool, settings) is language
    with pytest.raises(Invalid):
        await language_of(replace(POOL, tokenizer="tiny-1-gone"), settings)


@pytest.mark.parametrize(
    "module",
    ["cotrain_server", pytest.param("cotrain_workers", marks=pytest.mark.faults)],  # several seconds each
)
def test_a_process_with_a_wrong_bucket_ends_with_one_sentence(
    module: str, object_store: SeaweedFS, empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    settings = settings_of(empty_redis.url, tmp_path, tmp_path / "no-model") | object_store.variables()
    process = ended(module, settings | {"COTRAIN_BLOBS": "s3://nothing-here/x"})
    assert process.returncode == 2
    assert "COTRAIN_BLOBS: s3://nothing-here/x cannot be used" in process.stdout + process.stderr
