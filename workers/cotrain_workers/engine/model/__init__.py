"""Frozen base model: load, attention and kernels. Independent of adapters."""
