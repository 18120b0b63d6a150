"""Encrypted files: for those who were named, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pyrage
import pytest

from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.saves import external_folder
from cotrain_workers.checkpoints.encrypted_export import (
    base_model_of_files,
    refuse_recipients,
    write_external,
)

REF = WeightsRef("s:train:0:4")
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice"
CONTENT = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(100_000)}


def test_each_recipient_reads_every_file_and_nobody_else_does(tmp_path: Path) -> None:
    alice, bob, eve = (pyrage.x25519.Identity.generate() for _ in range(3))
    recipients = [str(alice.to_public()), SSH, str(bob.to_public())]
    size = write_external(Folder(tmp_path / "external"), REF, CONTENT, recipients, "m")
    folder = tmp_path / "external" / external_folder(REF)
    files = sorted(folder.glob("*.age"))
    assert [file.name for file in files] == [f"{name}.age" for name in CONTENT]
    assert size == sum(file.stat().st_size for file in files)
    assert (folder / SUMS).read_text() == sums_of({file.name: file.read_bytes() for file in files})
    for file in files:
        for identity in (alice, bob):
            plain = pyrage.decrypt(file.read_bytes(), [identity])
            assert plain == CONTENT[file.name.removesuffix(".age")]
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(file.read_bytes(), [eve])
    assert base_model_of_files(Folder(tmp_path / "external"), folder.name) == "m"


def test_what_was_encrypted_once_stays(tmp_path: Path) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    folder = tmp_path / "external" / external_folder(REF)
    size = write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m") == size
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_a_write_that_breaks_off_leaves_nothing_under_the_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_cut(_: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", power_cut)
    key = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(OSError, match="gone"):
        write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m")
    assert not list((tmp_path / "external" / external_folder(REF)).glob("[!.]*"))


def test_a_disk_that_fills_up_while_encrypting_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """age reports what a writer raised as an error of its own."""

    def encrypt_io(*_: object) -> None:
        raise pyrage.EncryptError("No space left on device (os error 28)")

    monkeypatch.setattr("pyrage.encrypt_io", encrypt_io)
    key = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(OSError, match="No space left"):
        write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m")


@pytest.mark.parametrize(
    "recipient",
    [
        "",
        "age1",
        "age1" + "q" * 58,
        "ssh-ed25519 AAAA",
        "ssh-",
        "AGE-SECRET-KEY-1",
        "é",
        "x" * 9999,
    ],
)
def test_a_recipient_that_is_none_is_named(recipient: str) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    assert refuse_recipients([key, SSH]) is None
    expected = "age_encryption_recipients[1] is no age or SSH public key."
    assert refuse_recipients([key, recipient]) == expected


def test_whose_a_folder_is_without_a_note_nobody_knows(tmp_path: Path) -> None:
    assert base_model_of_files(Folder(tmp_path), ".") is None
    (tmp_path / "owner.json").write_text("[]")
    assert base_model_of_files(Folder(tmp_path), ".") is None
