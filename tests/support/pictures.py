"""Random pictures as files, and hostile ones."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import PIL.Image

#: Preprocessing of the tiny models: pixels of a token's side, limits of the area, placeholder.
RULES: Mapping[str, int] = {"side": 8, "least_pixels": 256, "most_pixels": 4096, "token": 3}


def picture(seed: int, width: int, height: int, kind: str = "PNG", mode: str = "RGB", **settings: Any) -> bytes:
    """Return a random picture as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return saved(PIL.Image.fromarray(pixels).convert(mode), kind, **settings)


def saved(image: PIL.Image.Image, kind: str, **settings: Any) -> bytes:
    """Return a picture as a file."""
    stream = BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """Return the first bytes of a PNG of any size, which is cut before its pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"\x89PNG\r\n\x1a\n", struct.pack(">I", 13), header, struct.pack(">I", zlib.crc32(header)))
    data = b"IDAT" + zlib.compress(bytes(100))
    return b"".join((*parts, struct.pack(">I", len(data) - 4), data, struct.pack(">I", zlib.crc32(data))))


def animation() -> bytes:
    """Return a PNG of two frames."""
    frames = [PIL.Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    return saved(frames[0], "PNG", save_all=True, append_images=frames[1:])
