"""Files of adapters that arrive one by one, kept in the blob store until their import or their expiry."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from cotrain_server.adapter_upload.archive import MAX_CONFIG_BYTES, AdapterFiles
from cotrain_server.adapter_upload.peft_config import CONFIG
from cotrain_server.adapter_upload.peft_tensors import TENSORS
from cotrain_server.errors import Invalid
from cotrain_store.blobs.protocol import Blobs
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import TenantId

log = structlog.get_logger()

FOLDER = "pending_uploads"
#: Unfinished uploads of one tenant that have files.
MAX_PENDING = 4
SWEEP_EVERY_S = 300.0


def limits_of(max_upload_bytes: int) -> dict[str, int]:
    """Return the files of an upload, and their size limits in bytes."""
    return {CONFIG: MAX_CONFIG_BYTES, TENSORS: max_upload_bytes}


@dataclass(frozen=True)
class PendingFiles:
    """Files of one unfinished upload, in the blob store until their import or their expiry.

    A key is `<tenant>/<time of expiry>-<upload>/<file>`, so a sweep needs only the list of keys.
    """

    blobs: Blobs  # Blob store of the server
    tenant: TenantId
    name: str  # `<time of expiry>-<upload>`

    def put(self, file: str, content: bytes) -> None:
        """Store a file, or replace it.

        Raises:
            TOO_MANY_UPLOADS: the tenant has MAX_PENDING other unfinished uploads.
            OSError: it cannot be stored now.
        """
        of_tenant = self.blobs.below(f"{FOLDER}/{self.tenant}")
        others = {blob.key.split("/")[0] for blob in of_tenant.list()} - {self.name}
        if sum(not _is_expired(name, time.time()) for name in others) >= MAX_PENDING:
            raise Refused(
                Reason.TOO_MANY_UPLOADS,
                f"This tenant has {MAX_PENDING} unfinished uploads. Finish one, or wait until it expires.",
            )
        of_tenant.put(f"{self.name}/{file}", content)

    def read(self) -> AdapterFiles | None:
        """Return both files, or None if one does not exist. Raises OSError if they are unreadable now."""
        folder = self._folder()
        try:
            return AdapterFiles(folder.get(CONFIG), folder.get(TENSORS))
        except FileNotFoundError:
            return None

    def missing(self) -> Invalid:
        """Return the error of an upload without all of its files."""
        there = [file for file in (CONFIG, TENSORS) if self._folder().exists(file)]
        absent = " and ".join(file for file in (CONFIG, TENSORS) if file not in there)
        return Invalid(f"The upload has no {absent}. PUT each file to its URL, then finish again.")

    def delete(self) -> None:
        """Delete the files. Idempotent. Raises OSError."""
        of_tenant = self.blobs.below(f"{FOLDER}/{self.tenant}")
        for file in (CONFIG, TENSORS):
            of_tenant.delete(f"{self.name}/{file}")

    def _folder(self) -> Blobs:
        return self.blobs.below(f"{FOLDER}/{self.tenant}/{self.name}")


def delete_expired(blobs: Blobs, now: float) -> None:
    """Delete the files of all expired uploads. Raises OSError."""
    pending = blobs.below(FOLDER)
    for blob in list(pending.list()):
        if any(_is_expired(name, now) for name in blob.key.split("/")[1:2]):
            pending.delete(blob.key)
            log.info("pending_upload_expired", file=blob.key)


def _is_expired(name: str, now: float) -> bool:
    expiry = name.partition("-")[0]
    return expiry.isdecimal() and int(expiry) <= now


@asynccontextmanager
async def expiring(blobs: Blobs) -> AsyncIterator[None]:
    """Delete expired uploads at times within the block."""
    task = asyncio.create_task(_sweep(blobs))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _sweep(blobs: Blobs) -> None:
    while True:
        try:
            await asyncio.to_thread(delete_expired, blobs, time.time())
        except OSError as error:
            log.warning("pending_uploads_not_swept", reason=error.strerror)
        await asyncio.sleep(SWEEP_EVERY_S)
