"""Compression of request bodies, where the server asks for it and `zstandard` is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

ZSTD = "zstd"
SMALLEST_BYTES = 1_000
"""Less than this is one packet on the network in any case."""


@cache
def can_compress() -> bool:
    """Say whether `zstandard` is installed: the `zstd` extra of this package."""
    return find_spec("zstandard") is not None


def compress(body: bytes) -> bytes:
    """Make one zstd frame. A pass shrinks to a sixth or so: ids are small, and most weights one."""
    import zstandard  # an optional dependency, and slow to import

    return zstandard.ZstdCompressor().compress(body)
