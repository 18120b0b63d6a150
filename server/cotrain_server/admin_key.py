"""Admin key for `/metrics` and the whole of `/status`, from the settings or the data folder.

An address proves nothing: behind a proxy on this host that adds no header, every client appears to come from loopback.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cotrain_server.settings import ServerSettings
from cotrain_store.tenants.api_keys import MIN_CHARACTERS

#: File name in the data folder, where `cotrain top` reads it.
FILE = "admin-key"


def admin_key(settings: ServerSettings) -> str:
    """Return the key in the settings, otherwise that of the data folder, which is created if missing.

    Raises:
        OSError: the file cannot be read or created.
        ValueError: the file contains no key.
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
    """Write a key that only the owner of the folder can read. Another process may do the same concurrently."""
    temporary = path.with_suffix(f".{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_urlsafe(32)}\n")
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
