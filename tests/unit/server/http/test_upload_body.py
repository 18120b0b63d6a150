from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from starlette.requests import Request

from cotrain_server.errors import BodyTooSlow
from cotrain_server.http.upload_body import received
from cotrain_store.errors import DiskReserveReached

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Message

LIMIT = 4 * 1024**2


def request_of(*chunks: bytes) -> Request:
    left = [*chunks]

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "headers": []}, receive)


async def test_what_arrives_is_read_from_a_file_that_has_no_name(tmp_path: Path) -> None:
    chunks = [bytes([number]) * 300_000 for number in range(10)]
    async with received(request_of(*chunks), tmp_path / "uploads", LIMIT, 0) as file:
        assert not any((tmp_path / "uploads").iterdir())
        assert file.read() == b"".join(chunks)
    assert file.closed


async def test_the_disks_reserve_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(DiskReserveReached):
        async with received(request_of(b"x"), tmp_path, LIMIT, reserve_bytes=2**62):
            pass


async def test_an_upload_ends_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_server.http.upload_body.RECEIVE_S", 0.0)
    with pytest.raises(BodyTooSlow):
        async with received(request_of(*[b"x"] * 10_000), tmp_path, LIMIT, 0):
            pass
