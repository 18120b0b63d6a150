"""A data folder belongs to the Redis whose log refers to its files.

To any other one all of them are leftovers, which go when they are old: recovery copies, checkpoints and all.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from cotrain_store.disk.durable_files import make_folder, sync_folder
from cotrain_store.errors import ForeignFolder, StoreUnavailable
from cotrain_store.keys import fleet_keys
from cotrain_store.redis_client.connection import CONNECTION_LOST

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_store.redis_client.connection import SyncConnection

#: Names the Redis in its data folder.
MARK = "belongs-to"


def claim_folder(connection: SyncConnection, data_dir: Path) -> None:
    """Have a data folder belong to this Redis from now on, if it belongs to none. Twice is harmless.

    Raises:
        ForeignFolder: it belongs to another one, or to this one before it lost all it held.
        StoreUnavailable: Redis does not answer.
    """
    try:
        connection.set(fleet_keys.name(), secrets.token_hex(16), nx=True)
        name = connection.get(fleet_keys.name())
    except CONNECTION_LOST as lost:
        raise StoreUnavailable from lost
    mark = data_dir / MARK
    if not data_dir.exists():  # the folder above one that is there need not be ours to read
        make_folder(data_dir)
    if not mark.exists():
        _write(mark, name)
    if mark.read_bytes() != name:
        raise ForeignFolder(
            f"The files in {data_dir} belong to another Redis than this one, or it has lost all it held: "
            "it would take them for leftovers and delete them. Start the Redis they belong to, or set "
            f"another COTRAIN_DATA_DIR. Should that Redis be gone for good, keep a copy and delete {mark}."
        )


def _write(mark: Path, name: bytes) -> None:
    temporary = mark.with_suffix(f".{secrets.token_hex(8)}")
    with temporary.open("wb") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(mark)
    sync_folder(mark.parent)
