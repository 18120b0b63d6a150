"""Header of an uploaded tensor file, compared with the library's reader."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cotrain_server.adapter_upload.peft_config import named
from cotrain_server.adapter_upload.peft_tensors import MAX_HEADER_BYTES, read_header
from cotrain_server.errors import Invalid
from tests.support.draws import examples
from tests.support.uploads import raw_safetensors


def file(entries: Any, content: bytes = b"") -> bytes:
    return raw_safetensors(json.dumps(entries).encode(), content)


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_file_of_the_library_is_accepted() -> None:
    tensors = {"a": np.zeros((3, 5), np.float32), "b": np.zeros(2, np.float16), "c": np.zeros((0, 4), np.float32)}
    entries, metadata = read_header(save(tensors, {"format": "pt"}))
    assert metadata == {"format": "pt"}
    assert {name: (e.dtype, e.shape) for name, e in entries.items()} == {
        "a": ("F32", (3, 5)),
        "b": ("F16", (2,)),
        "c": ("F32", (0, 4)),
    }


HOSTILE = {
    "empty": b"",
    "short": b"\x05\0\0",
    "longer header than file": (100).to_bytes(8, "little") + b"{}",
    "header of 2**63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "header over the limit": raw_safetensors(b"{" + b" " * MAX_HEADER_BYTES + b"}"),
    "no JSON": raw_safetensors(b"not json"),
    "a list": file([]),
    "not UTF-8": raw_safetensors(b'{"\xff": 1}'),
    "deep": raw_safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "NaN": raw_safetensors(b'{"a": NaN}'),
    "the same name twice": raw_safetensors(b'{"a": 1, "a": 2}'),
    "metadata of numbers": file({"__metadata__": {"a": 1}}),
    "metadata that is no map": file({"__metadata__": []}),
    "entry that is no map": file({"a": 1}),
    "missing field": file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "another field": file({"a": {**entry(), "x": 1}}, bytes(8)),
    "integers": file({"a": entry(dtype="I32")}, bytes(8)),
    "dtype that is no text": file({"a": entry(dtype=["F32"])}, bytes(8)),
    "shape that is no list": file({"a": entry(shape=2)}, bytes(8)),
    "negative side": file({"a": entry(shape=(-2,))}, bytes(8)),
    "true side": file({"a": entry(shape=(True, 2))}, bytes(8)),
    "float side": file({"a": entry(shape=(2.0,))}, bytes(8)),
    "vast sides": file({"a": entry(shape=(2**40, 2**40))}, bytes(8)),
    "sides that overflow": file({"a": entry(shape=(2**32, 2**32))}, bytes(8)),
    "many sides": file({"a": entry(shape=[1] * 8 + [2])}, bytes(8)),
    "one offset": file({"a": entry(offsets=(0,))}, bytes(8)),
    "reversed offsets": file({"a": entry(offsets=(8, 0))}, bytes(8)),
    "offsets past the end": file({"a": entry(offsets=(8, 16))}, bytes(8)),
    "fewer bytes than the shape": file({"a": entry(offsets=(0, 4))}, bytes(4)),
    "overlap": file({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes": file({"a": entry(), "b": entry()}, bytes(8)),
    "gap": file({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "bytes of no tensor": file({"a": entry()}, bytes(9)),
    "file cut short": file({"a": entry()}, bytes(7)),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_malicious_header_is_refused_in_one_sentence(content: bytes) -> None:
    with pytest.raises(Invalid) as refused:
        read_header(content)
    assert str(refused.value).isascii()
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize("name", ["\ud800", "\n", "é", "x" * 10_000, "\x00"])
def test_any_name_fits_into_a_message(name: str) -> None:
    assert named(name).isascii()
    assert named(name).isprintable()
    assert len(named(name)) <= 200


def _whole() -> bytes:
    whole: bytes = save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)})
    return whole


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(_whole()) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_the_library_reads_an_accepted_header_equally(damage: list[tuple[int, int]]) -> None:
    content = bytearray(_whole())
    for index, value in damage:
        content[index] = value
    try:
        entries, _ = read_header(bytes(content))
    except Invalid:
        return
    try:
        tensors = load(bytes(content))
    except SafetensorError:  # it refuses parts that we skip: its own metadata, and names it cannot hold
        return
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: found.shape for name, found in entries.items()
    }


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8),
        _JSON | st.fixed_dictionaries({"dtype": st.just("F32"), "shape": _JSON, "data_offsets": _JSON}),
    ),
    st.binary(max_size=40),
)
def test_any_json_is_either_read_or_refused(entries: dict[str, Any], content: bytes) -> None:
    try:
        found, _ = read_header(file(entries, content))
    except Invalid:
        return
    assert sum(each.end - each.begin for each in found.values()) == len(content)
