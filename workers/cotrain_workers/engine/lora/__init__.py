"""LoRA on a row of many adapters: the reference loop, kernels, and their check."""
