"""Body reader, with valid bodies, decompression bombs and broken frames.

Values of a JSON body are counted before it is parsed, in time and memory proportional to its size.
"""

import json
import os
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from bench.neighbours.attacks import deflated_json_body
from cotrain.wire.codec import PROTOBUF
from cotrain_server.errors import BodyTooLarge, Unreadable
from cotrain_server.http import request_body
from cotrain_server.http.request_body import (
    CHATS,
    FEW,
    MANY,
    MAX_FRAMES,
    SMALL_BYTES,
    BodyReader,
    JsonLimits,
    count_json,
    decompress,
    decompress_small,
)
from cotrain_server.parser import Parser
from cotrain_store.errors import Reason
from cotrain_store.messages.ids import TenantId
from tests.support.refusals import refused

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
    parser = Parser()
    try:
        reader = BodyReader(parser, TenantId("t"), LIMIT, FEW)
        return await reader.read(request_of(chunks, **headers))
    finally:
        parser.close()


@pytest.mark.parametrize("declared", [True, False])
def test_a_frame_with_or_without_a_declared_size_is_decompressed(declared: bool) -> None:
    plain = os.urandom(300_000)
    assert decompress(compressed(plain, declared=declared), LIMIT) == plain


def test_several_frames_are_one_body() -> None:
    assert decompress(compressed(b"one ") + compressed(b"two"), LIMIT) == b"one two"


@pytest.mark.parametrize("declared", [True, False])
def test_a_bomb_with_or_without_a_declared_size_is_refused(declared: bool) -> None:
    bomb = compressed(bytes(64 * LIMIT), declared=declared)
    assert len(bomb) < LIMIT
    with pytest.raises(BodyTooLarge, match="Decompressed body exceeds 1 MiB"):
        decompress(bomb, LIMIT)


def test_a_bomb_of_many_small_frames_is_refused() -> None:
    with pytest.raises(BodyTooLarge):
        decompress(compressed(bytes(LIMIT // 4)) * 5, LIMIT)


def test_a_frame_that_needs_a_huge_window_is_refused() -> None:
    options = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=options).compressobj()
    with pytest.raises(Unreadable, match="not readable zstd"):
        decompress(compressor.compress(b"x" * 1000) + compressor.flush(), LIMIT)


@pytest.mark.parametrize("cut", [1, 3, 9])
def test_a_truncated_frame_is_unreadable(cut: int) -> None:
    with pytest.raises(Unreadable):
        decompress(compressed(os.urandom(10_000))[:-cut], LIMIT)


def test_bytes_that_are_not_a_frame_are_unreadable() -> None:
    with pytest.raises(Unreadable):
        decompress(b"not a zstd frame at all", LIMIT)


async def test_a_body_is_read_chunk_by_chunk() -> None:
    assert await read([b"ab", b"", b"c"]) == b"abc"


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(BodyTooLarge, match="Request body exceeds 1 MiB"):
        await read([], content_length=str(LIMIT + 1))


async def test_a_false_content_length_admits_no_more_bytes() -> None:
    with pytest.raises(BodyTooLarge):
        await read([bytes(LIMIT), b"x"], content_length="5")


async def test_a_compressed_body_is_decompressed() -> None:
    assert await read([compressed(b"hello")], content_encoding="zstd") == b"hello"


async def test_deep_json_inside_zstd_is_found() -> None:
    with pytest.raises(Unreadable):
        await read([compressed(b"[" * 99)], content_encoding="zstd", content_type="application/json")


async def test_other_encodings_are_refused_by_name() -> None:
    with refused(Reason.UNSUPPORTED_MEDIA_TYPE, match="'gzip'"):
        await read([b""], content_encoding="gzip")


def test_a_body_of_too_many_frames_is_refused() -> None:
    """Measured: 64 MB of empty frames took 12 s."""
    empty = compressed(b"")
    assert decompress(empty * MAX_FRAMES, LIMIT) == b""
    with pytest.raises(Unreadable, match=f"more than {MAX_FRAMES} frames"):
        decompress(empty * (MAX_FRAMES + 1), LIMIT)
    with pytest.raises(Unreadable, match="frames"):
        decompress(b"\x50\x2a\x4d\x18\0\0\0\0" * (MAX_FRAMES + 1), LIMIT)  # skippable frames


@pytest.mark.parametrize("declared", [True, False])
def test_only_small_bodies_are_decompressed_in_place(declared: bool) -> None:
    small = os.urandom(SMALL_BYTES - 100)
    assert decompress_small(compressed(small, declared=declared)) == small
    for large in (bytes(SMALL_BYTES + 1), bytes(64 * LIMIT), os.urandom(SMALL_BYTES)):
        assert decompress_small(compressed(large, declared=declared)) == b""
    assert decompress_small(compressed(b"one") + compressed(b"two")) == b""
    assert decompress_small(b"no frame") == b""


async def test_a_small_body_waits_for_no_thread() -> None:
    """A pass of three tokens used to wait for the bombs of other tenants."""
    parser = Parser()
    parser._threads.shutdown()
    request = request_of([compressed(b"hello")], content_encoding="zstd", content_type=PROTOBUF)
    assert await BodyReader(parser, TenantId("t"), LIMIT, FEW).read(request) == b"hello"
    parser.close()


MIB = 1024**2
NO_LIMIT = JsonLimits(values=10**9, containers=10**9)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def values_in(value: object) -> int:
    if isinstance(value, list):
        return 1 + sum(map(values_in, value))
    if isinstance(value, dict):
        return 1 + sum(1 + values_in(inner) for inner in value.values())
    return 1


@given(value=anything, piece=st.integers(1, 9))
def test_the_count_is_an_upper_bound_of_the_values(value: object, piece: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    assert values_in(value) - 1 <= count_json(body, NO_LIMIT)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request_body, "_FLAT_BYTES", 0)
        patched.setattr(request_body, "_BLOCK_BYTES", piece)
        counted = count_json(body, NO_LIMIT)
    # An empty list counts as if it held a value.
    assert values_in(value) - 1 <= counted <= 2 * values_in(value)


@pytest.mark.parametrize("limits", [FEW, MANY, CHATS])
def test_a_small_body_of_ten_million_lists_is_refused_in_little_memory(limits: JsonLimits) -> None:
    """Measured: 3 KB on the wire became 900 MB of lists, and no request was answered for 19 s."""
    plain = zstandard.decompress(deflated_json_body(), max_output_size=64 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge, match=f"more than {limits.containers} lists and objects"):
            count_json(plain, limits)
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    finally:
        tracemalloc.stop()


def test_scalar_values_are_counted_too() -> None:
    body = b'{"a": [' + b"1," * 20_000 + b"1]}"
    with pytest.raises(BodyTooLarge, match="more than 20000 values"):
        count_json(body, FEW)
    assert count_json(body, MANY) == 20_000 + 3
    assert count_json(json.dumps("a,b:[{" * 100_000).encode(), FEW) == 0


@pytest.mark.parametrize("body", [b"[" * 33, b'{"a":' * 33, b'"[[" ' * 40 + b"[{" * 17])
def test_json_nested_too_deep_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable, match="deeper than 32"):
        count_json(body, NO_LIMIT)


def test_depth_is_counted_across_blocks_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "_FLAT_BYTES", 0)
    monkeypatch.setattr(request_body, "_BLOCK_BYTES", 7)
    count_json(b"[1,{" * 16 + b"}]" * 16, NO_LIMIT)
    with pytest.raises(Unreadable):
        count_json(b"[1,{" * 17, NO_LIMIT)


@pytest.mark.parametrize(
    "body", [b"", b"[" * 32 + b"]" * 32, b"[]," * 1000, b'"' + b"[" * 99 + b'"', b'["\\"[[[[[[[["]']
)
def test_brackets_in_strings_and_in_sequence_are_not_depth(body: bytes) -> None:
    count_json(body, NO_LIMIT)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_string_continues_across_blocks_of_a_body(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(request_body, "_FLAT_BYTES", 0)
    monkeypatch.setattr(request_body, "_BLOCK_BYTES", chunk)
    count_json(b'["' + b"[" * 40 + rb"\"[\\\"[" + b'"]', NO_LIMIT)
    with pytest.raises(Unreadable):
        count_json(rb'["\\",' + b"[" * 32, NO_LIMIT)


@pytest.mark.parametrize("hostile", [b'"' + rb"\"" * 1_000_000, b'"' + b"a" * 4_000_000])
def test_an_unterminated_string_costs_at_most_its_size(hostile: bytes) -> None:
    tracemalloc.start()
    try:
        count_json(hostile, NO_LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 16 * len(hostile)
    finally:
        tracemalloc.stop()
