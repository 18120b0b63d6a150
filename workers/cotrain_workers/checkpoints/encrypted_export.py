"""Adapter files encrypted to whom a tenant named (age, https://age-encryption.org/v1).

A folder is `<root>/<external_folder(ref)>/` with every file of the adapter's folder as `<name>.age`, and
OWNER next to them. Encrypting twice never gives the same bytes, so these belong to one save alone.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING
from uuid import uuid4

import pyrage

from cotrain_store.disk.durable_files import sync_folder
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.weights import external_folder
from cotrain_workers.checkpoints.peft_folder import CONFIG, TENSORS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cotrain_store.messages.ids import WeightsRef

SUFFIX = ".age"
#: Whose files these are: `{"base_model": …, "weights": …}`. Never served.
OWNER = "owner.json"


def refuse_recipients(recipients: Sequence[str]) -> str | None:
    """Return which of the recipients age does not know, as a sentence for the tenant, or None."""
    for at, recipient in enumerate(recipients):
        try:
            _recipient(recipient)
        except pyrage.RecipientError:
            return f"age_encryption_recipients[{at}] is no age or SSH public key."
    return None


def write_external(
    root: Path, ref: WeightsRef, adapter: Path, recipients: Sequence[str], base_model: str
) -> int:
    """Encrypt the files of an adapter's folder, durable when this returns; return their bytes.

    Twice is harmless: what has been encrypted stays. Raises OSError, on a full disk for one.
    """
    folder = root / external_folder(ref)
    if not folder.exists():
        unfinished = folder.with_name(f".{folder.name}.{uuid4().hex}")
        unfinished.mkdir(parents=True, mode=0o700)
        keys = [_recipient(recipient) for recipient in recipients]
        for name in (CONFIG, TENSORS):  # no digests: age is authenticated, a torn file shows
            _encrypt(adapter / name, unfinished / (name + SUFFIX), keys)
            failpoint("external.half_written")
        owner = {"base_model": base_model, "weights": ref}
        with (unfinished / OWNER).open("w") as note:
            json.dump(owner, note)
            note.flush()
            os.fsync(note.fileno())
        sync_folder(unfinished)
        failpoint("external.before_rename")
        unfinished.rename(folder)
        failpoint("external.renamed")
    sync_folder(root)  # also for a process that died before it could do this
    return sum(file.stat().st_size for file in folder.glob(f"*{SUFFIX}"))


def remove_external(folder: Path) -> None:
    """Delete encrypted files; under its final name a folder is whole or gone. Twice is harmless."""
    aside = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside)


def base_model_of_files(folder: Path) -> str | None:
    """Read which base model encrypted files are for; None where that cannot be read."""
    try:
        name: str = json.loads((folder / OWNER).read_bytes())["base_model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name


def _recipient(text: str) -> pyrage.x25519.Recipient | pyrage.ssh.Recipient:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    return kind.Recipient.from_str(text)


def _encrypt(source: Path, target: Path, recipients: Sequence[object]) -> None:
    # Not `encrypt_file`: it keeps the interpreter's lock, for 1 s per 300 MB (pyrage 1.4.0).
    with source.open("rb") as plain, target.open("wb") as encrypted:
        try:
            pyrage.encrypt_io(plain, encrypted, recipients)
        except pyrage.EncryptError as failed:  # what the writer raised is only its text here
            raise OSError(str(failed)) from failed
        encrypted.flush()
        os.fsync(encrypted.fileno())
