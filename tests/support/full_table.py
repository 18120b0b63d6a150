"""Simulated process with the maximum number of open files."""

from __future__ import annotations

import errno
import os
from typing import NoReturn


def no_descriptor(*_: object, **__: object) -> NoReturn:
    """Raise the error of a call that opens a file."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
