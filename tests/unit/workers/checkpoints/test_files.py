"""Encrypted export files: readable by the named recipients only, and complete or missing."""

from __future__ import annotations

from pathlib import Path

import pyrage
import pytest

from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.runs import external_folder
from cotrain_workers.checkpoints.files import OWNER, base_model_of, refuse_recipients, write_external

REF = WeightsRef("s:train:0:4")
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN alice"
CONTENT = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(100_000)}


def test_only_the_recipients_can_read_the_files(tmp_path: Path) -> None:
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
    assert base_model_of(Folder(tmp_path / "external"), f"{folder.name}/{OWNER}") == "m"


def test_files_that_are_already_encrypted_are_not_written_again(tmp_path: Path) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    folder = tmp_path / "external" / external_folder(REF)
    size = write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m") == size
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.usefixtures("lost_disk")
def test_an_interrupted_write_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(OSError, match="gone"):
        write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m")
    assert not list((tmp_path / "external" / external_folder(REF)).glob("[!.]*"))


def test_a_full_disk_during_encryption_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """age raises its own exception for an error of the writer."""

    def encrypt_io(*_: object) -> None:
        raise pyrage.EncryptError("No space left on device (os error 28)")

    monkeypatch.setattr("pyrage.encrypt_io", encrypt_io)
    key = str(pyrage.x25519.Identity.generate().to_public())
    with pytest.raises(OSError, match="No space left"):
        write_external(Folder(tmp_path / "external"), REF, CONTENT, [key], "m")


@pytest.mark.parametrize(
    "recipient", ["", "age1", "age1" + "q" * 58, "ssh-ed25519 AAAA", "ssh-", "AGE-SECRET-KEY-1", "é", "x" * 9999]
)
def test_an_invalid_recipient_is_named(recipient: str) -> None:
    key = str(pyrage.x25519.Identity.generate().to_public())
    assert refuse_recipients([key, SSH]) is None
    expected = "age_encryption_recipients[1] is no age or SSH public key."
    assert refuse_recipients([key, recipient]) == expected


def test_a_folder_without_a_valid_owner_file_has_no_base_model(tmp_path: Path) -> None:
    assert base_model_of(Folder(tmp_path), OWNER) is None
    (tmp_path / "owner.json").write_text("[]")
    assert base_model_of(Folder(tmp_path), OWNER) is None
