"""Open the blobs that were set: a folder, or a bucket of an object store."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from cotrain_store.blobs.folder import Folder

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
