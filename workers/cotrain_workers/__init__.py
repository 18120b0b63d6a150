"""Training engine for many adapters in one pass over a frozen base model, and the worker around it.

`engine/` depends only on torch, transformers, safetensors, numpy, Pillow and their own dependencies. It can
therefore run and be measured on a bare GPU machine.
"""

import os

# In MKL's kernels for AVX2, the order in which a row is summed depends on the number of rows of a
# product. Its strict mode avoids that, with AVX2 and with AVX-512. MKL reads this variable at the
# first product of a process.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# torch reads it only at the first CUDA product of a process, which may precede the load of an engine.
# Without it, torch rejects all products once deterministic algorithms are enabled.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# The lengths of micro-batches vary, and freed blocks of one length rarely fit the next. Segments that
# expand leave no such gaps. torch reads this when it initializes CUDA. `PYTORCH_ALLOC_CONF` is its
# newer name.
if "PYTORCH_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
