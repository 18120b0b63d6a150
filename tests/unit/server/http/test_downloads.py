"""Downloads of files: opened safely, sent whole, in ranges, or as one tar."""

import errno
import io
import os
import tarfile
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response

from cotrain_server.http.downloads import CHUNK_BYTES, COMPLETE, file_download, open_files, tar_download, tar_size
from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.errors import CheckpointNotFound, StoreUnavailable

PATH = "tinker://s:train:0/weights/a"
CONTENTS = {"small.json": b"{}", "empty": b"", "large.bin": os.urandom(CHUNK_BYTES + 77)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / SUMS).write_text(sums_of(CONTENTS))
    return tmp_path


async def sent(response: Response, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(response)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        return await http.get("/", headers=headers)


@pytest.mark.parametrize("name", CONTENTS)
async def test_a_file_is_sent_whole_with_its_length_and_name(folder: Path, name: str) -> None:
    [file] = await open_files(Folder(folder), [name], PATH)
    answer = await sent(file_download(file, {}))
    assert answer.content == CONTENTS[name]
    assert answer.headers["content-length"] == str(len(CONTENTS[name]))
    assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
    assert file.content.closed


async def test_a_file_that_cannot_be_opened_now_is_not_reported_as_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("cotrain_store.blobs.folder.os.open", no_descriptor)
    with pytest.raises(StoreUnavailable, match="cannot be read now"):
        await open_files(Folder(folder), ["empty"], PATH)


async def test_a_broken_download_is_resumed(folder: Path) -> None:
    [file] = await open_files(Folder(folder), ["large.bin"], PATH)
    answer = await sent(file_download(file, {"range": "bytes=1000-"}))
    assert answer.status_code == 206
    assert answer.content == CONTENTS["large.bin"][1000:]
    assert file.content.closed
    for tag, status in ((answer.headers["etag"], 206), ('"another"', 200)):
        [file] = await open_files(Folder(folder), ["large.bin"], PATH)
        resumed = await sent(file_download(file, {"range": "bytes=1000-", "if-range": tag}))
        assert (resumed.status_code, resumed.headers["etag"]) == (status, answer.headers["etag"])


async def test_an_open_file_survives_its_deletion(folder: Path) -> None:
    [file] = await open_files(Folder(folder), ["small.json"], PATH)
    (folder / "small.json").unlink()
    (folder / "small.json").write_bytes(b"another")
    assert (await sent(file_download(file, {}))).content == b"{}"


async def test_a_tar_has_every_file_and_a_mark_of_completeness(folder: Path) -> None:
    files = await open_files(Folder(folder), list(CONTENTS), PATH)
    answer = await sent(tar_download(files, "a.tar", 1_000.5))
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        found = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        assert all(member.isreg() for member in tar.getmembers())
        assert {name: file.read() for name, file in found.items() if file} == {**CONTENTS, COMPLETE: b""}
    assert all(file.content.closed for file in files)


def test_a_tar_of_very_large_files_has_a_length() -> None:
    assert tar_size([2**40 + 1]) == 512 + 2**40 + 512 + 512 + 1024


async def test_a_link_is_not_followed(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "small.json")
    (folder / "folder").mkdir()
    for name in ("link", "folder", "missing"):
        with pytest.raises(CheckpointNotFound):
            await open_files(Folder(folder), [name], PATH)


async def test_a_pipe_is_refused_without_waiting_for_its_writer(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(CheckpointNotFound):
        await open_files(Folder(folder), ["pipe"], PATH)


async def test_one_missing_file_leaves_none_open(folder: Path) -> None:
    before = open_now()
    with pytest.raises(CheckpointNotFound):
        await open_files(Folder(folder), ["small.json", "missing"], PATH)
    with pytest.raises(CheckpointNotFound):
        await open_files(Folder(folder), ["small.json", "."], PATH)
    assert open_now() == before


def open_now() -> int:
    return len(list(Path("/dev/fd").iterdir()))
