"""Common guarantees of all blob stores."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cotrain_store.blobs.folder import Folder
from cotrain_store.blobs.opening import MARK, open_blobs
from cotrain_store.blobs.protocol import Blobs
from tests.support.object_store import SeaweedFS


@pytest.fixture(params=["folder", "objects"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blobs:
    if request.param == "folder":
        return Folder(tmp_path)
    server: SeaweedFS = request.getfixturevalue("object_store")
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    blobs = open_blobs(server.new_prefix(), tmp_path)
    blobs.put(MARK, b"a Redis")  # otherwise no blob is believed to be missing
    return blobs


def keys(blobs: Blobs, prefix: str = "") -> list[str]:
    return [blob.key for blob in blobs.list(prefix) if blob.key != MARK]


@pytest.mark.parametrize("size", [0, 1, 100_000, 12 * 1024**2])
def test_a_stored_blob_is_read_whole_and_in_ranges(blobs: Blobs, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    blobs.put("a/b/c", content)
    assert blobs.get("a/b/c") == content
    for start, end in ((0, 10), (3, 7), (size - 3, size + 3), (size, size + 1), (size + 9, size + 20)):
        if start >= 0:
            assert blobs.get("a/b/c", (start, end)) == content[start:end]


def test_an_unknown_key_is_missing(blobs: Blobs) -> None:
    blobs.put("a/b", b"x")
    for key in ("a/c", "a", "b/b"):
        assert not blobs.exists(key)
        for look in (blobs.get, blobs.open):
            with pytest.raises(OSError, match=r"No such|Not|not|directory|regular"):
                look(key)
    assert not blobs.touch("a/c")
    assert blobs.exists("a/b")


def test_a_second_put_replaces_a_blob_unless_it_must_be_new(blobs: Blobs) -> None:
    blobs.put("a/b", b"first", new=True)
    with pytest.raises(FileExistsError):
        blobs.put("a/b", b"second", new=True)
    assert blobs.get("a/b") == b"first"
    blobs.put("a/b", b"third")
    assert blobs.get("a/b") == b"third"
    assert keys(blobs) == ["a/b"]


def test_one_of_many_concurrent_puts_of_a_new_blob_succeeds(blobs: Blobs) -> None:
    together, won = threading.Barrier(6), []

    def put(number: int) -> None:
        together.wait()
        try:
            blobs.put("mark", b"%d" % number, new=True)
        except FileExistsError:
            return
        won.append(b"%d" % number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [blobs.get("mark")]


def test_a_list_has_keys_sizes_and_marks_that_change_with_the_content(blobs: Blobs) -> None:
    for key in ("a/2", "a/1/x", "ab/1", "b"):
        blobs.put(key, key.encode())
    assert sorted(keys(blobs)) == ["a/1/x", "a/2", "ab/1", "b"]
    assert sorted(keys(blobs, "a")) == ["a/1/x", "a/2"]
    assert keys(blobs, "c") == []
    assert {blob.key: blob.size for blob in blobs.list("a")} == {"a/1/x": 5, "a/2": 3}
    assert keys(blobs.below("a")) == keys(blobs.below("a"), "") != []
    assert sorted(keys(blobs.below("a"))) == ["1/x", "2"]
    assert blobs.below("a").below("1").get("x") == b"a/1/x"
    before = {blob.key: blob.mark for blob in blobs.list()}
    assert {blob.key: blob.mark for blob in blobs.list()} == before
    blobs.put("b", b"another")
    assert {blob.key for blob in blobs.list() if blob.mark != before[blob.key]} == {"b"}


def test_a_deleted_blob_is_missing_and_deleting_twice_is_harmless(blobs: Blobs) -> None:
    for key in ("a/b/1", "a/b/2"):
        blobs.put(key, b"x")
    blobs.delete("a/b/1")
    blobs.delete("a/b/1")
    blobs.delete("c/d")
    assert keys(blobs) == ["a/b/2"]
    blobs.delete("a/b/2")
    assert keys(blobs) == []
    blobs.put("a/b/1", b"again")
    assert blobs.get("a/b/1") == b"again"


def test_an_open_blob_is_read_from_any_offset(blobs: Blobs) -> None:
    content = bytes(range(256)) * 40_000
    blobs.put("a/large", content)
    file, blob = blobs.open("a/large")
    with file:
        assert (blob.key, blob.size) == ("a/large", len(content))
        assert file.read(3) == content[:3]
        file.seek(5_000_000)
        assert file.read(100) == content[5_000_000:5_000_100]
        file.seek(0)
        assert b"".join(iter(lambda: file.read(1024**2), b"")) == content
