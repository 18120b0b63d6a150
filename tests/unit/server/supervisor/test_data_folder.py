"""Data folder: used by one server at a time, and readable by its owner only."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain_server.supervisor.data_folder import LOG_BYTES, DataFolder, FolderInUse, UnsafeFolder, UnusableFolder
from cotrain_store.disk.embedded_redis import MAX_SOCKET_PATH


def test_only_one_server_may_use_a_folder(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    lock = folder.lock()
    with pytest.raises(FolderInUse, match="Another server uses"):
        folder.lock()
    os.close(lock)
    os.close(folder.lock())


def test_the_folder_is_locked_until_the_last_process_of_a_server_ends(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    lock = folder.lock()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,)) as child:
        os.close(lock)
        with pytest.raises(FolderInUse):
            folder.lock()
        child.communicate(b"\n")
    os.close(folder.lock())


def test_every_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    os.close(folder.open_log("api"))
    for path in (folder.path, folder.logs, folder.redis, folder.socket().parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.logs / "api.log").stat().st_mode) == 0o600


def test_a_socket_path_too_long_for_the_kernel_is_replaced_by_a_short_one(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / ("x" * MAX_SOCKET_PATH))
    socket = folder.socket()
    assert len(str(socket)) <= MAX_SOCKET_PATH
    assert socket == folder.socket()
    socket.parent.rmdir()


def test_a_folder_readable_by_others_is_not_used_for_the_socket(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(UnsafeFolder):
        DataFolder(tmp_path).socket()


def test_a_large_log_is_rotated_while_its_process_writes(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    descriptor = folder.open_log("api")
    os.truncate(folder.logs / "api.log", LOG_BYTES + 1)
    folder.put_logs_aside()
    os.write(descriptor, b"later")
    os.close(descriptor)
    assert (folder.logs / "api.log").read_bytes() == b"later"
    aside = (folder.logs / "api.log.1").stat()
    assert (aside.st_size, stat.S_IMODE(aside.st_mode)) == (LOG_BYTES + 1, 0o600)


def test_a_log_of_usual_size_is_kept(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    descriptor = folder.open_log("api")
    os.write(descriptor, b"line")
    folder.put_logs_aside()
    os.close(descriptor)
    assert [path.name for path in folder.logs.iterdir()] == ["api.log"]


@pytest.mark.parametrize("below", ["", "under", "under/it"])
def test_an_unusable_folder_is_named_with_the_reason(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / below
    with pytest.raises(UnusableFolder, match=f"^The data folder {path} cannot be used: Not a dir"):
        DataFolder(path)


def test_a_full_disk_is_detected_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = DataFolder(tmp_path)
    folder.check_writable()
    monkeypatch.setattr("cotrain_server.supervisor.data_folder.os.fsync", full)
    with pytest.raises(UnusableFolder, match=f"{tmp_path} cannot be used: No space left on device"):
        folder.check_writable()


def test_a_file_system_without_locks_is_not_reported_as_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlockable(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("cotrain_server.supervisor.data_folder.fcntl.flock", unlockable)
    with pytest.raises(UnusableFolder, match="No locks available"):
        DataFolder(tmp_path).lock()
