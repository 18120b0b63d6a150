"""Import again, in a forked process, what its parent had imported: what a test says of imports holds there too."""

from __future__ import annotations

import sys

import torch


def forget(*packages: str) -> None:
    """Drop the modules of packages whose names begin so, and the operators of torch that they define."""
    for name in [name for name in sys.modules if name.startswith(packages)]:
        for value in vars(sys.modules.pop(name)).values():
            if isinstance(value, torch.library.Library):
                value._destroy()
