"""Limit of numpy's threads. Import it before numpy, whose libraries otherwise start a thread per core.

An API process multiplies no matrices. A variable that is already set keeps its value.
"""

import os

for _library in ("OMP", "OPENBLAS", "MKL", "RAYON"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
