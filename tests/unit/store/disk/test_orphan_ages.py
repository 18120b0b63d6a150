from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cotrain_store.disk.orphan_ages import Unwanted

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).write_bytes(b"x")
    return [folder / name for name in names]


def test_a_file_goes_that_was_unwanted_at_every_look_for_long(tmp_path: Path) -> None:
    unwanted, (a, b) = Unwanted(10), written(tmp_path, "a", "b")
    assert unwanted.old([a], 100) == []
    assert unwanted.old([a, b], 109) == []
    assert unwanted.old([a, b], 110) == [a]
    assert unwanted.old([b], 119) == [b]


def test_its_date_tells_nothing(tmp_path: Path) -> None:
    unwanted, (a,) = Unwanted(10), written(tmp_path, "a")
    os.utime(a, (0, 0))
    assert unwanted.old([a], 100) == []


def test_a_file_that_was_wanted_in_between_begins_anew(tmp_path: Path) -> None:
    unwanted, (a,) = Unwanted(10), written(tmp_path, "a")
    unwanted.old([a], 100)
    unwanted.old([], 105)
    assert unwanted.is_empty
    assert unwanted.old([a], 110) == []
    assert unwanted.old([a], 120) == [a]


def test_a_file_that_was_touched_or_replaced_begins_anew(tmp_path: Path) -> None:
    unwanted, files = Unwanted(10), written(tmp_path, "touched", "longer", "replaced", "same")
    touched, longer, replaced, same = files
    unwanted.old(files, 100)
    os.utime(touched, (0, 0))
    longer.write_bytes(b"xx")
    written(tmp_path, "new")[0].rename(replaced)
    assert unwanted.old(files, 110) == [same]
    assert unwanted.old(files, 120) == files


def test_a_folder_in_which_a_file_is_written_begins_anew(tmp_path: Path) -> None:
    unwanted, folder = Unwanted(10), tmp_path / "folder"
    folder.mkdir()
    (inner,) = written(folder, "inner")
    unwanted.old([folder], 100)
    inner.write_bytes(b"xx")
    assert unwanted.old([folder], 110) == []
    assert unwanted.old([folder], 120) == [folder]


def test_a_file_that_another_process_removed_is_forgotten(tmp_path: Path) -> None:
    assert Unwanted(0).old([tmp_path / "gone"], 100) == []
