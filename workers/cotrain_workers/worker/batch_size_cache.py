"""The measured sizes of micro-batches, written down: a restart on the same hardware uses the same.

A size moves last bits, and a measurement may come out a little differently each time.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger()


class BatchSizeCache:
    """Tokens of a micro-batch by circumstances, in one small file of JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tokens(self, circumstances: str) -> int | None:
        """Return what was measured under these circumstances."""
        return self._read().get(circumstances)

    def remember(self, circumstances: str, tokens: int) -> None:
        """Write a size down. Two workers that do so at once may lose one; it is measured again."""
        known = {**self._read(), circumstances: tokens}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        written.replace(self._path)

    def _read(self) -> dict[str, int]:
        try:
            found = json.loads(self._path.read_text())
            return {str(name): int(tokens) for name, tokens in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as broken:
            log.warning("batch_sizes_unreadable", path=str(self._path), reason=str(broken))
            return {}
