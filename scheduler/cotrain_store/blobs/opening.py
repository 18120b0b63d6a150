"""Opening of the configured blobs (a folder, or a bucket of an object store), and the claim of their owner.

Blobs belong to the Redis whose log refers to them. Any other Redis would treat them all as leftovers and delete them
when they are old, including recovery copies and checkpoints.
"""

from __future__ import annotations

import contextlib
import secrets
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from cotrain_store import redis_keys
from cotrain_store.blobs.folder import Folder, make_folder
from cotrain_store.blobs.protocol import Blobs, BlobsUnavailable
from cotrain_store.errors import StoreUnavailable, UnsafeRedis
from cotrain_store.redis_client.connection import CONNECTION_LOST, SyncConnection

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

#: Schemes of an address. obstore supports more, none of which is tested here.
SCHEMES = ("s3", "gs", "az", "file")
#: Timeouts after which an unresponsive store fails; the waiting operations retry.
_CLIENT: ClientConfig = {
    "allow_http": True,  # if the operator's endpoint uses http
    "connect_timeout": "5s",
    "read_timeout": "20s",
    "timeout": "30m",
}
_RETRIES: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}


def check_url(url: str) -> None:
    """Raise ValueError, with a sentence, if a URL is not an address of blobs."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{url!r} begins with none of {', '.join(f'{s}://' for s in SCHEMES)}.")
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise ValueError(f"{url!r} names no folder: file:///path.")
        return
    if not parts.netloc or parts.username or parts.query:
        raise ValueError(f"{url!r} is not {parts.scheme}://bucket/prefix; credentials are variables.")
    try:
        import obstore  # noqa: F401 - an extra, which others do not need
    except ImportError:
        raise ValueError(f"{url!r} needs what `pip install 'cotrain[objects]'` installs.") from None


def open_blobs(url: str, data_dir: Path) -> Blobs:
    """Return the blobs at a valid address; without an address, those of the data folder."""
    if not url:
        return Folder(data_dir)
    if url.startswith("file:"):
        return Folder(Path(unquote(urlsplit(url).path)))
    return _objects(url)


@lru_cache  # its connections are shared by all users in a process
def _objects(url: str) -> Blobs:
    from obstore.store import from_url

    from cotrain_store.blobs.objects import Objects

    return Objects(from_url(url, client_options=_CLIENT, retry_config=_RETRIES))


#: Key of the blob that contains the id of the Redis.
MARK = "belongs-to"


def claim_blobs(connection: SyncConnection, data_dir: Path, url: str = "") -> None:
    """Assign blobs (`open_blobs`) to this Redis, if they belong to none. Idempotent.

    Raises:
        UnsafeRedis: they belong to another one, or to this one before it lost all its data; or the object
            store cannot be used: bucket, credentials, endpoint.
        StoreUnavailable: Redis does not answer.
    """
    blobs = open_blobs(url, data_dir)
    where, setting = (url, "COTRAIN_BLOBS") if url else (data_dir, "COTRAIN_DATA_DIR")
    try:
        connection.set(redis_keys.name(), secrets.token_hex(16), nx=True)
        name = connection.get(redis_keys.name())
    except CONNECTION_LOST as lost:
        raise StoreUnavailable from lost
    # Parents of an existing folder may be unreadable for this user.
    if blobs.folder and not blobs.folder.exists():
        make_folder(blobs.folder)
    try:
        owner = _owner(blobs, name)
    except (BlobsUnavailable, FileNotFoundError) as failed:
        if isinstance(failed, BlobsUnavailable) and not failed.is_refusal:
            raise StoreUnavailable(f"{setting}: {where} does not answer: {failed.strerror}.") from failed
        raise UnsafeRedis(
            f"{setting}: {where} cannot be used: {failed.strerror}. Check that the bucket exists, and the "
            "variables with its credentials, region and endpoint."
        ) from failed
    if owner != name:
        raise UnsafeRedis(
            f"The files in {where} belong to another Redis, or this Redis has lost its data. It would delete them "
            f"as unreferenced files. Start the Redis they belong to, or set another {setting}. If that Redis is "
            f"lost, keep a copy of the files and delete {where}/{MARK}."
        )


def _owner(blobs: Blobs, name: bytes) -> bytes:
    """Return the owner of the blobs; `name` becomes the owner if there is none."""
    if not blobs.exists(MARK):
        with contextlib.suppress(FileExistsError):  # another process has just done so
            blobs.put(MARK, name, new=True)
    return blobs.get(MARK)
