"""Fresh imports in a forked process: modules that its parent had imported are imported again."""

from __future__ import annotations

import sys

import torch


def forget(*packages: str) -> None:
    """Remove the modules of packages with these name prefixes, and the torch operators that they
    define."""
    for name in [name for name in sys.modules if name.startswith(packages)]:
        for value in vars(sys.modules.pop(name)).values():
            if isinstance(value, torch.library.Library):
                value._destroy()
