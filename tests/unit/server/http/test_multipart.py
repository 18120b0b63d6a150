"""A file in a form is found where it lies, and read like a file of its own."""

from __future__ import annotations

import io
import tempfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import pytest

from cotrain_server.errors import Unreadable, UnsupportedMediaType
from cotrain_server.http.multipart import file_in_form

if TYPE_CHECKING:
    from collections.abc import Iterator

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
def test_a_file_is_found_whatever_it_holds(content: bytes, before: bytes) -> None:
    with stored(before + HEAD + content + TAIL) as form:
        found = file_in_form(form, TYPE, "file")
        assert found.read() == content
        assert found.seek(-1, io.SEEK_END) == len(content) - 1 if content else True
        found.seek(0)
        assert found.read(10) == content[:10]


@pytest.mark.parametrize(
    "form",
    [
        b"",
        OTHER,
        HEAD,
        HEAD + b"x",
        (HEAD + b"x" + TAIL)[3:],
        b"x" * 100_000,
        OTHER * 40 + HEAD + TAIL,
    ],
)
def test_a_form_without_it_or_cut_short_is_refused(form: bytes) -> None:
    with stored(form) as file, pytest.raises(Unreadable):
        file_in_form(file, TYPE, "file")


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data"])
def test_what_is_no_form_is_refused(content_type: str) -> None:
    with stored(HEAD + TAIL) as file, pytest.raises(UnsupportedMediaType):
        file_in_form(file, content_type, "file")
