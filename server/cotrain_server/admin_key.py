"""The key that opens `/metrics` and the whole of `/status`: one that is set, or one of the data folder.

An address proves nothing: behind a proxy on this host, which may add no header of its own, every client
comes from loopback.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cotrain_server.settings import ServerSettings
from cotrain_store.tenants.api_keys import MIN_CHARACTERS

#: In the data folder; `cotrain top` reads it there.
FILE = "admin-key"


def admin_key(settings: ServerSettings) -> str:
    """Give the operator's key; without one in the settings, that of the data folder, made if need be.

    Raises:
        OSError: the file cannot be read or made.
        ValueError: it holds no key.
    """
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    path = settings.data_dir / FILE
    if not path.exists():
        _make(path)
    key = path.read_text().strip()
    if len(key) < MIN_CHARACTERS:
        raise ValueError(f"{path} holds no key. Delete it: the next start makes one.")
    return key


def _make(path: Path) -> None:
    """Write a key that only the owner of the folder can read; another process may be doing the same."""
    temporary = path.with_suffix(f".{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_urlsafe(32)}\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
