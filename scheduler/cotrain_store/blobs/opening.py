"""Open the blobs that were set: a folder, or a bucket of an object store.

What holds the blobs belongs to the Redis whose log refers to them.

To any other one all of them are leftovers, which go when they are old: recovery copies, checkpoints and all.
"""

from __future__ import annotations

import contextlib
import secrets
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from cotrain_store.blobs.folder import Folder, make_folder
from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable
from cotrain_store.errors import ForeignFolder, StoreUnavailable, UnusableBlobs
from cotrain_store.keys import fleet_keys
from cotrain_store.redis_client.connection import CONNECTION_LOST, SyncConnection

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

    from cotrain_store.blobs.protocol import Blobs

#: What an address begins with; obstore knows more, of which we have tried none.
SCHEMES = ("s3", "gs", "az", "file")
#: A store that does not answer, or stops in the middle, fails so soon; what waits for it tries again.
_CLIENT: ClientConfig = {
    "allow_http": True,  # where the operator's endpoint says http
    "connect_timeout": "5s",
    "read_timeout": "20s",
    "timeout": "30m",
}
_RETRIES: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


def check_url(url: str) -> None:
    """Raises ValueError, a sentence, for what is no address of blobs."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{url!r} begins with none of {', '.join(f'{s}://' for s in SCHEMES)}.")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"{url!r} names no folder: file:///path.")
        return
    if not parts.netloc or parts.username or parts.query:
        raise ValueError(
            f"{url!r} is not {parts.scheme}://bucket/prefix; credentials are variables."
        )
    try:
        import obstore  # noqa: F401 - an extra, which others do not need
    except ImportError:
        raise ValueError(f"{url!r} needs what `pip install 'cotrain[objects]'` installs.") from None


def open_blobs(url: str, data_dir: Path) -> Blobs:
    """Open the blobs at an address that `check_url` takes; without one those of the data folder."""
    if not url:
        return Folder(data_dir)
    if url.startswith("file:"):
        return Folder(Path(unquote(urlsplit(url).path)))
    return _objects(url)


@lru_cache  # its connections are shared by all that a process opens
def _objects(url: str) -> Blobs:
    from obstore.store import from_url

    from cotrain_store.blobs.objects import Objects

    return Objects(from_url(url, client_options=_CLIENT, retry_config=_RETRIES))


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
