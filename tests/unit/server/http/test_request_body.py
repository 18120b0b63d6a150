"""The body reader against honest bodies, bombs and broken frames."""

from __future__ import annotations

import os
import tracemalloc

import pytest
import zstandard
from starlette.requests import Request

from cotrain_server.errors import BodyTooLarge, Unreadable, UnsupportedMediaType
from cotrain_server.http import request_body as bodies
from cotrain_server.http.request_body import decompress, read_body, refuse_deep_json

LIMIT = 1024 * 1024


def compressed(plain: bytes, *, declared: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=declared).compress(plain)


def request_of(chunks: list[bytes], **headers: str) -> Request:
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": names}, receive)


async def read(chunks: list[bytes], **headers: str) -> bytes:
    return await read_body(request_of(chunks, **headers), LIMIT)


@pytest.mark.parametrize("declared", [True, False])
def test_a_frame_is_decompressed_whether_or_not_it_declares_its_size(declared: bool) -> None:
    plain = os.urandom(300_000)
    assert decompress(compressed(plain, declared=declared), LIMIT) == plain


def test_several_frames_are_one_body() -> None:
    assert decompress(compressed(b"one ") + compressed(b"two"), LIMIT) == b"one two"


@pytest.mark.parametrize("declared", [True, False])
def test_a_bomb_is_refused_whether_or_not_it_declares_its_size(declared: bool) -> None:
    bomb = compressed(bytes(64 * LIMIT), declared=declared)
    assert len(bomb) < LIMIT
    with pytest.raises(BodyTooLarge, match="Decompressed body exceeds 1 MiB"):
        decompress(bomb, LIMIT)


def test_a_bomb_of_many_small_frames_is_refused() -> None:
    with pytest.raises(BodyTooLarge):
        decompress(compressed(bytes(LIMIT // 4)) * 5, LIMIT)


def test_a_frame_that_wants_a_huge_window_is_refused() -> None:
    options = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=options).compressobj()
    with pytest.raises(Unreadable, match="not readable zstd"):
        decompress(compressor.compress(b"x" * 1000) + compressor.flush(), LIMIT)


@pytest.mark.parametrize("cut", [1, 3, 9])
def test_a_truncated_frame_is_unreadable(cut: int) -> None:
    with pytest.raises(Unreadable):
        decompress(compressed(os.urandom(10_000))[:-cut], LIMIT)


def test_bytes_that_are_no_frame_are_unreadable() -> None:
    with pytest.raises(Unreadable):
        decompress(b"not a zstd frame at all", LIMIT)


@pytest.mark.parametrize("body", [b"[" * 33, b'{"a":' * 33, b'"[[" ' * 40 + b"[{" * 17])
def test_json_nested_too_deep_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable, match="deeper than 32"):
        refuse_deep_json(body)


def test_depth_is_counted_across_the_chunks_a_body_is_looked_at_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "_DEPTH_STEP", 7)
    refuse_deep_json(b"[1,{" * 16 + b"}]" * 16)
    with pytest.raises(Unreadable):
        refuse_deep_json(b"[1,{" * 17)


@pytest.mark.parametrize(
    "body", [b"", b"[" * 32 + b"]" * 32, b"[]," * 1000, b'"' + b"[" * 99 + b'"', b'["\\"[[[[[[[["]']
)
def test_brackets_inside_strings_and_next_to_each_other_are_not_depth(body: bytes) -> None:
    refuse_deep_json(body)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_string_goes_on_across_the_chunks_a_body_is_looked_at_in(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(bodies, "_DEPTH_STEP", chunk)
    refuse_deep_json(b'["' + b"[" * 40 + rb"\"[\\\"[" + b'"]')
    with pytest.raises(Unreadable):
        refuse_deep_json(rb'["\\",' + b"[" * 32)


@pytest.mark.parametrize("hostile", [b'"' + rb"\"" * 1_000_000, b'"' + b"a" * 4_000_000])
def test_a_string_that_never_ends_costs_no_more_than_its_size(hostile: bytes) -> None:
    tracemalloc.start()
    try:
        refuse_deep_json(hostile)
        assert tracemalloc.get_traced_memory()[1] < 16 * len(hostile)
    finally:
        tracemalloc.stop()


async def test_a_body_is_read_chunk_by_chunk() -> None:
    assert await read([b"ab", b"", b"c"]) == b"abc"


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(BodyTooLarge, match="Request body exceeds 1 MiB"):
        await read([], content_length=str(LIMIT + 1))


async def test_a_lying_length_does_not_get_more_bytes_through() -> None:
    with pytest.raises(BodyTooLarge):
        await read([bytes(LIMIT), b"x"], content_length="5")


async def test_a_compressed_body_is_decompressed() -> None:
    assert await read([compressed(b"hello")], content_encoding="zstd") == b"hello"


async def test_deep_json_inside_zstd_is_found() -> None:
    with pytest.raises(Unreadable):
        await read(
            [compressed(b"[" * 99)], content_encoding="zstd", content_type="application/json"
        )


async def test_other_encodings_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedMediaType, match="'gzip'"):
        await read([b""], content_encoding="gzip")
