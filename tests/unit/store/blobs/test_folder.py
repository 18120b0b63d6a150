"""What survives a power cut: not only what files hold, but their names and their folders' names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cotrain_server.supervisor.data_folder import DataFolder
from cotrain_store.blobs.folder import Folder, make_folder, passes, sync_folder
from cotrain_store.disk.spool import Spool
from cotrain_store.redis_client.embedded_server import LOG_FOLDER


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """Each folder that was synced, and the names in it at that moment."""
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


def test_the_name_of_each_new_folder_is_durable(
    tmp_path: Path, synced: list[tuple[Path, list[str]]]
) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [(tmp_path, ["a"]), (tmp_path / "a", ["b"]), (tmp_path / "a" / "b", ["c"])]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")} == {0o700}


def test_a_folder_that_a_dead_process_made_is_made_durable_now(
    tmp_path: Path, synced: list[tuple[Path, list[str]]]
) -> None:
    (tmp_path / "a").mkdir()
    make_folder(tmp_path / "a")
    assert synced == [(tmp_path, ["a"])]


def test_a_file_in_the_place_of_a_folder_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a")


def test_a_folder_that_is_removed_while_it_is_looked_at_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it after the first look at it: a second one would say that it is no folder."""
    folder, look = tmp_path / "shared", Path.stat
    folder.mkdir()

    def removed_after(self: Path, **kwargs: bool) -> os.stat_result:
        found = look(self, **kwargs)
        if self == folder:
            folder.rmdir()
        return found

    monkeypatch.setattr(Path, "stat", removed_after)
    make_folder(folder)


def test_a_folder_that_is_removed_while_a_file_is_put_into_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it with its last file, between our two looks at it."""
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


def test_all_that_must_outlive_a_power_cut_is_in_folders_with_durable_names(
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
def test_what_says_nothing_of_a_file_passes(error: Exception, expected: bool) -> None:
    assert passes(error) is expected
