"""Files of saved adapters: written by a thread, read by the worker, deleted once unreferenced.

A save has three groups of files: the adapter in PEFT's format, the optimizer state, and encrypted
files. The first two are named after their content, so that two workers may write the
same one. Workers of all pools share them; each pool removes the files of its own base model.

Encrypted files are an adapter's config and tensors for a tenant's recipients (age, https://age-encryption.org/v1), as
`<external_folder(ref)>/<name>.age` with their SHA256SUMS. OWNER is next to them and written last: a folder without it
is incomplete. Encrypting twice never produces the same bytes, so these files belong to one save alone.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyrage
import structlog

from cotrain_store.blobs.protocol import Blob, Blobs, BlobsUnavailable
from cotrain_store.disk.checksums import SUMS, sums_of
from cotrain_store.disk.sweep import UnreferencedFiles
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.runs import external_folder
from cotrain_workers.checkpoints.peft_folder import CONFIG, TENSORS, key_of, read_metadata, write_folder
from cotrain_workers.checkpoints.state_files import SUFFIX as STATE_SUFFIX
from cotrain_workers.checkpoints.state_files import optimizer_key, write_optimizer
from cotrain_workers.engine.ops import HostOptimizer, HostWeights
from cotrain_workers.engine.spec import Layout

if TYPE_CHECKING:
    from cotrain_store.weights import SavedWeights  # it loads redis, which a replay does not need

log = structlog.get_logger()

#: Age in s above which a file is written again before it is referred to, which makes it young.
YOUNG_S = 60.0
SUFFIX = ".age"
#: Owner of the files: `{"base_model": …, "weights": …}`. Never served.
OWNER = "owner.json"


@dataclass(frozen=True)
class Saved:
    """Host copy of a save, and the recipients of its encryption."""

    weights: HostWeights
    optimizer: HostOptimizer | None = None
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenFiles:
    """Durable files of a save; `size` is the bytes of all of them."""

    digest: str
    size: int
    optimizer_digest: str  # empty: it has none
    written_at: float  # time of the monotonic clock in s


class CheckpointFiles:
    """Files of one base model's saves. The folders below are of all base models."""

    def __init__(self, blobs: Blobs, base_model: str) -> None:
        self.blobs = blobs
        self.base_model = base_model
        self.adapters = blobs.below("weights")
        self.optimizers = blobs.below("optimizers")
        self.external = blobs.below("external")  # encrypted files
        self.removing = threading.Lock()
        """Lock for removing files and for publishing references. Published files are not removed."""

    def write(self, ref: WeightsRef, saved: Saved, layout: Layout) -> WrittenFiles:
        """Write all files of a save, durable on return. Idempotent. Raises OSError."""
        began = time.monotonic()
        adapter = write_folder(self.adapters, saved.weights, layout, self.base_model)
        size, optimizer_digest = adapter.size, ""
        if saved.optimizer:
            written = write_optimizer(self.optimizers, saved.optimizer, self.base_model)
            size, optimizer_digest = size + written.size, written.digest
        if saved.recipients:
            contents = {name: self.adapters.get(f"{adapter.key}/{name}") for name in (CONFIG, TENSORS)}
            size += write_external(self.external, ref, contents, saved.recipients, self.base_model)
        return WrittenFiles(adapter.digest, size, optimizer_digest, began)

    def confirm(self, ref: WeightsRef, saved: Saved, written: WrittenFiles) -> bool:
        """Return True if all files of a save that is about to be published exist, and are young to every observer.

        They may have been written long ago if Redis was unavailable. Raises OSError.
        """
        keys = [(self.adapters, f"{key_of(written.digest)}/{CONFIG}")]
        if written.optimizer_digest:
            keys.append((self.optimizers, optimizer_key(written.optimizer_digest)))
        if saved.recipients:
            keys.append((self.external, f"{external_folder(ref)}/{OWNER}"))
        if time.monotonic() - written.written_at > YOUNG_S:
            return all(blobs.touch(key) for blobs, key in keys)
        return all(blobs.exists(key) for blobs, key in keys)

    def remove_orphans(self, saved: SavedWeights, unwanted: UnreferencedFiles, now: float) -> None:
        """Delete the files of forgotten weights, and partial files of crashed processes.

        Another worker may be about to refer to a file that it found. So only files that were
        `unwanted` for long are removed: a process that writes or finds one changes its mark.
        Raises OSError.
        """
        orphans = dict(self._orphans(saved))
        # A mark changes when one of the files is written.
        marks = {key: " ".join(blob.mark for blob in blobs) for key, (blobs, _) in orphans.items()}
        for key in unwanted.old(marks, now):
            blobs, is_known = orphans[key]
            with self.removing:
                if is_known(_name(key)):
                    continue  # a save has found it since
                log.info("files_removed", files=[blob.key for blob in blobs])
                for blob in blobs:
                    self.blobs.delete(blob.key)

    def _orphans(self, saved: SavedWeights) -> Iterator[tuple[str, tuple[list[Blob], Callable[[str], bool]]]]:
        """Yield unfinished groups, and unreferenced groups of this base model, by their keys."""
        for prefix, sign, is_known in (
            ("weights", CONFIG, saved.has_content),
            ("optimizers", "", saved.has_optimizer),
            ("external", OWNER, saved.has_external),
        ):
            for key, blobs in _groups(self.blobs.list(prefix), sign).items():
                if is_known(_name(key)):
                    continue
                last = f"{key}/{sign}" if sign else key
                is_whole = blobs[0].key == last and not blobs[0].is_unfinished
                if not is_whole or base_model_of(self.blobs, last) == self.base_model:
                    yield key, (blobs, is_known)


def _name(key: str) -> str:
    """Return the digest of a group, or the folder of an export."""
    return key.rpartition("/")[2].partition(".")[0]


def _groups(blobs: Iterator[Blob], sign: str) -> dict[str, list[Blob]]:
    """Group files that are removed together, by folder; the file that marks it as complete, if any, is first.

    An optimizer state and an unfinished file are groups of their own.
    """
    groups: defaultdict[str, list[Blob]] = defaultdict(list)
    for blob in blobs:
        is_one = blob.is_unfinished or not sign
        groups[blob.key if is_one else blob.key.rpartition("/")[0]].append(blob)
    return {key: sorted(group, key=lambda blob: not blob.key.endswith(f"/{sign}")) for key, group in groups.items()}


def base_model_of(blobs: Blobs, key: str) -> str | None:
    """Return the base model in a CONFIG, an OWNER or a state; None if it cannot be read. Raises BlobsUnavailable."""
    field = "base_model_name_or_path" if key.endswith(CONFIG) else "base_model"
    try:
        is_state = key.endswith(STATE_SUFFIX)
        content = read_metadata(blobs, key) if is_state else json.loads(blobs.get(key))
        name: str = content[field]
    except BlobsUnavailable:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name


def refuse_recipients(recipients: Sequence[str]) -> str | None:
    """Return an error for recipients that age does not support, as a sentence for the tenant, or None."""
    for at, recipient in enumerate(recipients):
        try:
            _recipient(recipient)
        except pyrage.RecipientError:
            return f"age_encryption_recipients[{at}] is no age or SSH public key."
    return None


def write_external(
    blobs: Blobs, ref: WeightsRef, contents: Mapping[str, bytes], recipients: Sequence[str], base_model: str
) -> int:
    """Encrypt the files of an adapter, durable when this returns; return their bytes.

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
