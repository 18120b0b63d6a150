from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.spool import RESULTS, Spool, SpoolRef, new_writer, unwritten_segments
from cotrain_store.errors import SpoolCorrupt
from tests.support.processes import environment_of

#: Time limit in seconds: no step here takes a second, so a deadlock fails the test.
PATIENCE_S = 120


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path / "spool", "w")
    yield spool
    spool.close()


class HeldDisk:
    """Stand-in for `os.fdatasync` that counts the calls, and lets them return when released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.entered = threading.Event()
        self.released = threading.Event()
        monkeypatch.setattr("cotrain_store.disk.spool.os.fdatasync", self)

    def __call__(self, file: int) -> None:
        self.calls += 1
        self.entered.set()
        assert self.released.wait(PATIENCE_S)


def put(spool: Spool, payload: bytes) -> str:
    return spool.put(payload).result(PATIENCE_S)


def test_a_record_is_read_by_any_process(spool: Spool, tmp_path: Path) -> None:
    refs = [put(spool, payload) for payload in (b"", b"x", b"y" * 100_000)]
    reader = Spool(tmp_path / "spool", "another")
    assert [reader.read(ref) for ref in refs] == [b"", b"x", b"y" * 100_000]
    reader.close()


def test_waiting_puts_share_one_sync(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk(monkeypatch)
    first = spool.put(b"first")
    assert disk.entered.wait(PATIENCE_S)
    others = [spool.put(b"%d" % number) for number in range(50)]
    disk.released.set()
    refs = [durable.result(PATIENCE_S) for durable in (first, *others)]
    assert disk.calls == 2
    assert [spool.read(ref) for ref in refs] == [b"first", *(b"%d" % n for n in range(50))]


def test_no_reference_is_returned_before_the_record_is_durable(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk(monkeypatch)
    durable = spool.put(b"x")
    assert disk.entered.wait(PATIENCE_S)
    assert not durable.done()
    disk.released.set()
    assert durable.result(PATIENCE_S)


def test_a_full_segment_is_followed_by_a_new_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "w", segment_bytes=1_000)
    refs = [put(spool, b"x" * 600) for _ in range(5)]
    assert [SpoolRef.parse(ref).segment for ref in refs] == ["w-0", "w-0", "w-1", "w-1", "w-2"]
    assert all(spool.read(ref) == b"x" * 600 for ref in refs)
    spool.close()


def test_segments_are_readable_by_their_owner_only(spool: Spool) -> None:
    segment = spool.folder / SpoolRef.parse(put(spool, b"x")).segment
    assert segment.stat().st_mode & 0o777 == 0o600


@given(at=st.integers(0, 200), cut=st.booleans())
def test_a_record_changed_on_disk_is_never_read(tmp_path_factory: pytest.TempPathFactory, at: int, cut: bool) -> None:
    spool = Spool(tmp_path_factory.mktemp("spool"), "w")
    ref = put(spool, b"z" * 173)
    segment = spool.folder / "w-0"
    content = bytearray(segment.read_bytes())
    assert len(content) == 201
    if cut:
        content = content[:at]
    else:
        content[at] ^= 1
    segment.write_bytes(bytes(content))
    with pytest.raises(SpoolCorrupt):
        spool.read(ref)
    spool.close()


def test_a_torn_tail_damages_no_complete_record(spool: Spool) -> None:
    whole, torn = put(spool, b"whole"), put(spool, b"torn")
    segment = spool.folder / "w-0"
    segment.write_bytes(segment.read_bytes()[:-1])
    assert spool.read(whole) == b"whole"
    with pytest.raises(SpoolCorrupt):
        spool.read(torn)


def test_a_record_of_a_missing_segment_is_corrupt(spool: Spool) -> None:
    ref = put(spool, b"x")
    (spool.folder / "w-0").unlink()
    with pytest.raises(SpoolCorrupt, match="cannot be read"):
        spool.read(ref)


@pytest.mark.parametrize("cause", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_record_unreadable_for_now_is_not_corrupt(spool: Spool, monkeypatch: pytest.MonkeyPatch, cause: int) -> None:
    ref = put(spool, b"x")

    def refused(*_: object) -> None:
        raise OSError(cause, os.strerror(cause))

    with monkeypatch.context() as short:
        short.setattr("pathlib.Path.open", refused)
        with pytest.raises(OSError, match=os.strerror(cause)):
            spool.read(ref)
    assert spool.read(ref) == b"x"


def test_a_record_on_a_bad_sector_is_corrupt(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = put(spool, b"x")

    def bad_sector(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pathlib.Path.open", bad_sector)
    with pytest.raises(SpoolCorrupt, match="Input/output error"):
        spool.read(ref)


@pytest.mark.parametrize(
    "ref",
    [
        "",
        "inline",
        "spool:../../etc/passwd:0:1:" + "0" * 32,
        "spool:.hidden:0:1:" + "0" * 32,
        "spool:w-0:-1:1:" + "0" * 32,
        "spool:w-0:0:1:" + "0" * 31,
        "spool:w-0:0:1:" + "0" * 32 + "\n",
    ],
)
def test_only_valid_references_are_followed(spool: Spool, ref: str) -> None:
    with pytest.raises(SpoolCorrupt, match="Not a spool reference"):
        spool.read(ref)


@given(
    st.builds(
        SpoolRef,
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    )
)
def test_a_reference_is_unchanged_by_formatting_and_parsing(ref: SpoolRef) -> None:
    assert SpoolRef.parse(str(ref)) == ref


def test_a_worker_named_like_a_host_can_read_its_results(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RESULTS + new_writer("gpu-1.example.com"))
    assert spool.read(put(spool, b"x")) == b"x"
    spool.close()


def test_every_start_of_a_process_has_its_own_writer() -> None:
    assert new_writer("api") != new_writer("api")


def test_a_cancelled_caller_does_not_stop_the_writer(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = HeldDisk(monkeypatch)
    first = spool.put(b"first")
    assert disk.entered.wait(PATIENCE_S)
    given_up = spool.put(b"given up")
    assert given_up.cancel()
    assert not first.cancel()  # it is being written
    disk.released.set()
    assert spool.read(first.result(PATIENCE_S)) == b"first"
    assert spool.read(put(spool, b"next")) == b"next"


def test_a_full_disk_fails_the_put_and_the_next_one_starts_a_segment(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = put(spool, b"before")

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("cotrain_store.disk.spool.os.write", no_space)
        with pytest.raises(OSError, match="No space"):
            put(spool, b"lost")
    after = put(spool, b"after")
    assert SpoolRef.parse(after).segment == "w-1"
    assert (spool.read(before), spool.read(after)) == (b"before", b"after")


def test_a_segment_that_cannot_be_opened_fails_the_put_and_not_the_writer(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", "w", segment_bytes=1)
    put(spool, b"x")
    blocking = tmp_path / "spool" / "w-1"
    blocking.write_bytes(b"in the way")
    with pytest.raises(FileExistsError):
        put(spool, b"y")
    assert spool.read(put(spool, b"z")) == b"z"
    spool.close()


def test_closing_finishes_waiting_puts(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "w")
    waiting = [spool.put(b"%d" % number) for number in range(20)]
    spool.close()
    assert [spool.read(durable.result(0)) for durable in waiting] == [b"%d" % n for n in range(20)]


def free(folder: Path) -> list[str]:
    return list(unwritten_segments(Folder(folder)))


def test_a_segment_is_locked_until_its_references_are_settled(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "w", segment_bytes=100)
    first, second = put(spool, b"x" * 60), put(spool, b"y" * 60)
    full = put(spool, b"z")  # in the next segment
    assert free(tmp_path) == []
    spool.settle([first])
    assert free(tmp_path) == []
    spool.settle([second])
    assert free(tmp_path) == ["w-0"]
    spool.settle([full])
    assert free(tmp_path) == ["w-0"]  # the other one is still being written
    spool.close()
    assert free(tmp_path) == ["w-0", "w-1"]


def test_a_killed_process_locks_no_segment(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from cotrain_store.disk.spool import Spool\n"
        "Spool(pathlib.Path(sys.argv[1]), 'w').put(b'x').result()\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_of({}),
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stdout.readline() == b"written\n"
        assert free(tmp_path) == []
        process.kill()
        process.wait(PATIENCE_S)
    assert free(tmp_path) == ["w-0"]


def test_an_idle_segment_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotrain_store.disk.spool.REST_S", 0.01)
    spool = Spool(tmp_path, "w")
    spool.settle([put(spool, b"x")])
    while free(tmp_path) == []:
        time.sleep(0.01)
    assert SpoolRef.parse(put(spool, b"y")).segment == "w-1"
    spool.close()


def test_a_writer_detects_that_its_file_is_missing_and_writes_again(spool: Spool) -> None:
    put(spool, b"lost")
    (spool.folder / "w-0").unlink()
    assert spool.read(put(spool, b"after")) == b"after"


def test_a_writer_detects_that_its_file_was_replaced(spool: Spool) -> None:
    put(spool, b"lost")
    (spool.folder / "w-0").unlink()
    (spool.folder / "w-0").write_bytes(b"another")
    assert spool.read(put(spool, b"after")) == b"after"


def test_a_file_removed_repeatedly_fails_the_put(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(file: int) -> None:
        Path(f"/proc/self/fd/{file}").readlink().unlink()

    with monkeypatch.context() as removed:
        removed.setattr("cotrain_store.disk.spool.os.fdatasync", remove)
        with pytest.raises(OSError, match="removes the files of the spool"):
            put(spool, b"lost")
    assert spool.read(put(spool, b"after")) == b"after"


def test_a_reference_of_another_writer_is_settled_by_that_one(tmp_path: Path) -> None:
    spools = Spool(tmp_path, "a"), Spool(tmp_path, "b")
    ref = put(spools[0], b"x")
    spools[1].settle([ref])
    spools[0].close()
    spools[1].close()


def test_on_a_disk_without_locks_no_segment_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_bytes(b"")

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("cotrain_store.disk.spool.fcntl.flock", unknown)
    assert free(tmp_path) == []


def test_a_segment_removed_by_another_worker_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "api-old").symlink_to(tmp_path / "removed")
    assert free(tmp_path) == []
