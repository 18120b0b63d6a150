"""Kernel of attention over the pages of a KV cache."""
