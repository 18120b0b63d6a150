"""A process that has as many files open as it may."""

from __future__ import annotations

import errno
import os
from typing import NoReturn


def no_descriptor(*_: object, **__: object) -> NoReturn:
    """Stand in for what opens a file."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
