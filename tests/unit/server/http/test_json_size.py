"""What a JSON body holds is counted before it is parsed, in time and memory of its size."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bench.neighbours.attacks import deflated_json_body
from cotrain_server.errors import BodyTooLarge, Unreadable
from cotrain_server.http import json_size
from cotrain_server.http.json_size import CHATS, FEW, MANY, JsonLimits, count_json

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
def test_no_more_values_are_there_than_were_counted(value: object, piece: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_size, "_BLOCK_BYTES", piece)
        counted = count_json(body, NO_LIMIT)
    # An empty list is counted as if it held a value.
    assert values_in(value) - 1 <= counted <= 2 * values_in(value)


@pytest.mark.parametrize("limits", [FEW, MANY, CHATS])
def test_a_small_body_of_ten_million_lists_is_refused_in_the_memory_of_its_first_ones(
    limits: JsonLimits,
) -> None:
    """3 KB on the wire were 900 MB of lists, and 19 s in which nobody was answered."""
    plain = zstandard.decompress(deflated_json_body(), max_output_size=64 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge, match=f"more than {limits.containers} lists and objects"):
            count_json(plain, limits)
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    finally:
        tracemalloc.stop()


def test_values_that_are_no_containers_are_counted_too() -> None:
    body = b'{"a": [' + b"1," * 20_000 + b"1]}"
    with pytest.raises(BodyTooLarge, match="more than 20000 values"):
        count_json(body, FEW)
    assert count_json(body, MANY) == 20_000 + 3
    assert count_json(json.dumps("a,b:[{" * 100_000).encode(), FEW) == 0


@pytest.mark.parametrize("body", [b"[" * 33, b'{"a":' * 33, b'"[[" ' * 40 + b"[{" * 17])
def test_json_nested_too_deep_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable, match="deeper than 32"):
        count_json(body, NO_LIMIT)


def test_depth_is_counted_across_the_chunks_a_body_is_looked_at_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_size, "_BLOCK_BYTES", 7)
    count_json(b"[1,{" * 16 + b"}]" * 16, NO_LIMIT)
    with pytest.raises(Unreadable):
        count_json(b"[1,{" * 17, NO_LIMIT)


@pytest.mark.parametrize(
    "body", [b"", b"[" * 32 + b"]" * 32, b"[]," * 1000, b'"' + b"[" * 99 + b'"', b'["\\"[[[[[[[["]']
)
def test_brackets_inside_strings_and_next_to_each_other_are_not_depth(body: bytes) -> None:
    count_json(body, NO_LIMIT)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_string_goes_on_across_the_chunks_a_body_is_looked_at_in(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(json_size, "_BLOCK_BYTES", chunk)
    count_json(b'["' + b"[" * 40 + rb"\"[\\\"[" + b'"]', NO_LIMIT)
    with pytest.raises(Unreadable):
        count_json(rb'["\\",' + b"[" * 32, NO_LIMIT)


@pytest.mark.parametrize("hostile", [b'"' + rb"\"" * 1_000_000, b'"' + b"a" * 4_000_000])
def test_a_string_that_never_ends_costs_no_more_than_its_size(hostile: bytes) -> None:
    tracemalloc.start()
    try:
        count_json(hostile, NO_LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 16 * len(hostile)
    finally:
        tracemalloc.stop()
