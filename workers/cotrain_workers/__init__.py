"""The engine that trains many adapters in one pass over a frozen base model, and the worker around it.

`engine/` needs torch, transformers, safetensors and numpy only, and what these bring along, so it runs
and is measured on a bare GPU machine.
"""

import os

# MKL's kernels for AVX2 add up a row in another order where a product has another number of rows; its
# strict mode does not, here or with AVX-512. MKL looks at its first product in a process.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# torch looks for it at the first product on CUDA in a process, which may come before an engine is loaded, and
# never again: products are refused ever after if deterministic algorithms are asked for later without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
