"""Import this before anything that imports numpy: its libraries start a thread per core otherwise.

An API process multiplies no matrices. Where a variable is set already, that stands.
"""

from __future__ import annotations

import os

for _library in ("OMP", "OPENBLAS", "MKL", "RAYON"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
