"""LoRA inside the products of the base model: Triton kernels, as torch ops, and the tables they read."""
