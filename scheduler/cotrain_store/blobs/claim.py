"""What holds the blobs belongs to the Redis whose log refers to them.

To any other one all of them are leftovers, which go when they are old: recovery copies, checkpoints and all.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from cotrain_store.blobs.durable_files import make_folder
from cotrain_store.blobs.opening import open_blobs
from cotrain_store.blobs.protocol import BlobsUnavailable
from cotrain_store.errors import ForeignFolder, StoreUnavailable, UnusableBlobs
from cotrain_store.keys import fleet_keys
from cotrain_store.redis_client.connection import CONNECTION_LOST

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_store.blobs.protocol import Blobs
    from cotrain_store.redis_client.connection import SyncConnection

#: Names the Redis, among the blobs.
MARK = "belongs-to"


def claim_blobs(connection: SyncConnection, data_dir: Path, url: str = "") -> None:
    """Have blobs (`open_blobs`) belong to this Redis from now on, if they belong to none. Twice is harmless.

    Raises:
        ForeignFolder: they belong to another one, or to this one before it lost all it held.
        StoreUnavailable: Redis does not answer.
        UnusableBlobs: the store of objects refuses, or does not answer: bucket, credentials, endpoint.
    """
    blobs = open_blobs(url, data_dir)
    where, setting = (url, "COTRAIN_BLOBS") if url else (data_dir, "COTRAIN_DATA_DIR")
    try:
        connection.set(fleet_keys.name(), secrets.token_hex(16), nx=True)
        name = connection.get(fleet_keys.name())
    except CONNECTION_LOST as lost:
        raise StoreUnavailable from lost
    if (
        blobs.folder and not blobs.folder.exists()
    ):  # what is above one that is there need not be ours to read
        make_folder(blobs.folder)
    try:
        owner = _owner(blobs, name)
    except (BlobsUnavailable, FileNotFoundError) as failed:
        if isinstance(failed, BlobsUnavailable) and not failed.is_refusal:
            raise StoreUnavailable(
                f"{setting}: {where} does not answer: {failed.strerror}."
            ) from failed
        raise UnusableBlobs(
            f"{setting}: {where} cannot be used: {failed.strerror}. Check that the bucket is there, and the "
            "variables with its credentials, region and endpoint."
        ) from failed
    if owner != name:
        raise ForeignFolder(
            f"The files in {where} belong to another Redis than this one, or it has lost all it held: "
            "it would take them for leftovers and delete them. Start the Redis they belong to, or set "
            f"another {setting}. Should that Redis be gone for good, keep a copy and delete {where}/{MARK}."
        )


def _owner(blobs: Blobs, name: bytes) -> bytes:
    """Read whose these are, `name`'s if no Redis's so far."""
    if not blobs.exists(MARK):
        with contextlib.suppress(FileExistsError):  # another process has just done so
            blobs.put(MARK, name, new=True)
    return blobs.get(MARK)
