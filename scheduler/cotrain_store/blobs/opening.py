"""Open the blobs that were set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.blobs.folder import Folder

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_store.blobs.protocol import Blobs


def open_blobs(data_dir: Path) -> Blobs:
    """Open the blobs of the data folder."""
    return Folder(data_dir)
