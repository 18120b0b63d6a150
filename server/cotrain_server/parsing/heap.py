"""Give freed memory back to the host: the allocator of C keeps what threads have freed."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give back what is free; does nothing where the C library has no such call (musl, macOS).

    Other threads run on. A heap of a gigabyte takes some milliseconds.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
