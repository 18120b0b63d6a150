"""Upload bodies: stored in a temporary file within limits, or read from a file in a form."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from starlette.requests import Request
from starlette.types import Message

from cotrain_server.errors import Unreadable
from cotrain_server.http.upload_body import file_in_form, received
from cotrain_store.errors import Reason
from tests.support.refusals import refused

LIMIT = 4 * 1024**2


def request_of(*chunks: bytes) -> Request:
    left = [*chunks]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "headers": []}, receive)


async def test_a_body_is_read_from_a_file_without_a_name(tmp_path: Path) -> None:
    chunks = [bytes([number]) * 300_000 for number in range(10)]
    async with received(request_of(*chunks), tmp_path / "uploads", LIMIT, 0) as file:
        assert not any((tmp_path / "uploads").iterdir())
        assert file.read() == b"".join(chunks)
    assert file.closed


async def test_the_disk_reserve_is_not_used(tmp_path: Path) -> None:
    with refused(Reason.DISK_RESERVE_REACHED):
        async with received(request_of(b"x"), tmp_path, LIMIT, reserve_bytes=2**62):
            pass


async def test_an_upload_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_server.http.upload_body.RECEIVE_S", 0.0)
    with refused(Reason.BODY_TOO_SLOW):
        async with received(request_of(*[b"x"] * 10_000), tmp_path, LIMIT, 0):
            pass


TYPE = "multipart/form-data; boundary=----mint-upload-0123"
OTHER = b'------mint-upload-0123\r\nContent-Disposition: form-data; name="note"\r\n\r\nfile\r\n'
HEAD = (
    b"------mint-upload-0123\r\n"
    b'Content-Disposition: form-data; name="file"; filename="a.tar.gz"\r\n'
    b"Content-Type: application/gzip\r\n\r\n"
)
TAIL = b"\r\n------mint-upload-0123--\r\n"


@contextmanager
def stored(content: bytes) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file


@pytest.mark.parametrize("content", [b"", b"x", b"\r\n--", bytes(range(256)) * 3_000])
@pytest.mark.parametrize("before", [b"", OTHER])
def test_a_file_with_any_content_is_found_in_a_form(content: bytes, before: bytes) -> None:
    with stored(before + HEAD + content + TAIL) as form:
        found = file_in_form(form, TYPE, "file")
        assert found.read() == content
        assert found.seek(-1, io.SEEK_END) == len(content) - 1 if content else True
        found.seek(0)
        assert found.read(10) == content[:10]


@pytest.mark.parametrize(
    "form", [b"", OTHER, HEAD, HEAD + b"x", (HEAD + b"x" + TAIL)[3:], b"x" * 100_000, OTHER * 40 + HEAD + TAIL]
)
def test_a_form_without_a_file_or_cut_short_is_refused(form: bytes) -> None:
    with stored(form) as file, pytest.raises(Unreadable):
        file_in_form(file, TYPE, "file")


@pytest.mark.parametrize("rest", [OTHER * 40 + TAIL, HEAD + b"y" + TAIL, b"\r\n--wrong"])
def test_the_first_whole_file_is_returned_whatever_follows_it(rest: bytes) -> None:
    with stored(HEAD + b"x" + TAIL[:-4] + b"\r\n" + rest) as form:
        assert file_in_form(form, TYPE, "file").read() == b"x"


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data"])
def test_a_body_that_is_not_a_form_is_refused(content_type: str) -> None:
    with stored(HEAD + TAIL) as file, refused(Reason.UNSUPPORTED_MEDIA_TYPE):
        file_in_form(file, content_type, "file")
