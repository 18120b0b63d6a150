"""Adapter files encrypted to a tenant's recipients (age, https://age-encryption.org/v1).

A folder is `<external_folder(ref)>/` with the adapter's config and tensors as `<name>.age` and
their SHA256SUMS. OWNER is next to them and written last: a folder without it is incomplete.
Encrypting twice never produces the same bytes, so these files belong to one save alone.
"""

import io
import json
from collections.abc import Mapping, Sequence

import pyrage

from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable
from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.runs import external_folder

SUFFIX = ".age"
#: Owner of the files: `{"base_model": …, "weights": …}`. Never served.
OWNER = "owner.json"


def refuse_recipients(recipients: Sequence[str]) -> str | None:
    """Return an error for recipients that age does not support, as a sentence for the tenant, or
    None.
    """
    for at, recipient in enumerate(recipients):
        try:
            _recipient(recipient)
        except pyrage.RecipientError:
            return f"age_encryption_recipients[{at}] is no age or SSH public key."
    return None


def write_external(
    blobs: Blobs, ref: WeightsRef, contents: Mapping[str, bytes], recipients: Sequence[str], base_model: str
) -> int:
    """Encrypt the files of an adapter, durable when this returns; return their bytes. The owner is
    written last.

    Idempotent: encrypted files stay. Raises OSError, for example on a full disk.
    """
    folder = external_folder(ref)
    if not blobs.touch(f"{folder}/{OWNER}"):
        keys = [_recipient(recipient) for recipient in recipients]
        encrypted = {f"{name}{SUFFIX}": _encrypted(content, keys) for name, content in contents.items()}
        for name, content in encrypted.items():
            blobs.put(f"{folder}/{name}", content)
            failpoint("external.half_written")
        blobs.put(f"{folder}/{SUMS}", sums_of(encrypted).encode())
        owner = {"base_model": base_model, "weights": ref}
        failpoint("external.before_rename")
        blobs.put(f"{folder}/{OWNER}", json.dumps(owner).encode())
        failpoint("external.renamed")
    return sum(blob.size for blob in blobs.list(folder) if blob.key.endswith(SUFFIX))


def base_model_of_files(blobs: Blobs, folder: str) -> str | None:
    """Return the base model of encrypted files; None if it cannot be read. Raises
    BlobsUnavailable.
    """
    try:
        name: str = json.loads(blobs.get(f"{folder}/{OWNER}"))["base_model"]
    except BlobsUnavailable:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name


def _recipient(text: str) -> pyrage.x25519.Recipient | pyrage.ssh.Recipient:
    kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
    return kind.Recipient.from_str(text)


def _encrypted(content: bytes, recipients: Sequence[object]) -> bytes:
    # Not `encrypt`: it keeps the interpreter's lock, for 1 s per 300 MB (pyrage 1.4.0).
    encrypted = io.BytesIO()
    try:
        pyrage.encrypt_io(io.BytesIO(content), encrypted, recipients)
    except pyrage.EncryptError as failed:
        raise OSError(str(failed)) from failed
    return encrypted.getvalue()
