"""Durability after a power cut: contents of files, their names, and the names of their folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_store.blobs.folder import Folder, make_folder, passes, sync_folder
from cotrain_store.disk.embedded_redis import LOG_FOLDER
from cotrain_store.disk.spool import Spool


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """List the synced folders, each with the names in it at that moment."""
    calls: list[tuple[Path, list[str]]] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_dir():
            calls.append((path, sorted(entry.name for entry in path.iterdir())))
        fsync(handle)

    monkeypatch.setattr("cotrain_store.blobs.folder.os.fsync", noted)
    return calls


def durable(synced: list[tuple[Path, list[str]]]) -> set[Path]:
    return {folder / name for folder, names in synced for name in names}


def test_the_name_of_each_new_folder_is_durable(tmp_path: Path, synced: list[tuple[Path, list[str]]]) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [(tmp_path, ["a"]), (tmp_path / "a", ["b"]), (tmp_path / "a" / "b", ["c"])]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}


def test_a_folder_made_by_an_earlier_process_is_made_durable(
    tmp_path: Path, synced: list[tuple[Path, list[str]]]
) -> None:
    (tmp_path / "a").mkdir()
    make_folder(tmp_path / "a")
    assert synced == [(tmp_path, ["a"])]


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a")


def test_a_folder_removed_while_it_is_checked_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes the folder after the first `stat`. A second one would report that it is not a folder."""
    folder, look = tmp_path / "shared", Path.stat
    folder.mkdir()

    def removed_after(self: Path, **kwargs: bool) -> os.stat_result:
        found = look(self, **kwargs)
        if self == folder:
            folder.rmdir()
        return found

    monkeypatch.setattr(Path, "stat", removed_after)
    make_folder(folder)


def test_a_folder_removed_during_a_put_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes the folder with its last file, between the two attempts to create it."""
    mkdir = Path.mkdir
    removed: list[Path] = []

    def removed_once(self: Path, *args: object, **kwargs: object) -> None:
        if self.name == "shared" and not removed:
            removed.append(self)
            raise FileExistsError(errno.EEXIST, "File exists", str(self))
        mkdir(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", removed_once)
    Folder(tmp_path).put("shared/a", b"content")
    assert Folder(tmp_path).get("shared/a") == b"content"
    assert removed


def test_all_data_that_must_survive_a_power_cut_is_in_durable_folders(
    tmp_path: Path, synced: list[tuple[Path, list[str]]]
) -> None:
    data = tmp_path / "data"
    folder = DataFolder(data)
    Spool(data / "spool", "w").close()
    blobs, key = Folder(data).below("weights"), "ab/abcd/adapter_config.json"
    blobs.put(key, b"{}")
    of_key = (data / "weights", *(data / "weights" / key).parents, data / "weights" / key)
    needed = {data, folder.redis, folder.redis / LOG_FOLDER, data / "spool"}
    assert needed | {path for path in of_key if path.is_relative_to(data)} <= durable(synced)


def test_a_folder_can_be_made_durable(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, ""), True),
        (OSError(errno.ENOMEM, ""), True),
        (OSError(errno.ESTALE, ""), True),
        (PermissionError(errno.EACCES, ""), True),
        (FileNotFoundError(errno.ENOENT, ""), False),
        (OSError(errno.EIO, ""), False),
        (ValueError(), False),
    ],
)
def test_a_transient_error_says_nothing_about_the_file(error: Exception, expected: bool) -> None:
    assert passes(error) is expected
