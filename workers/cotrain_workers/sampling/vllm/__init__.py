"""Sampler on a vLLM server: its protocol, and a check of its answers. Independent of Redis."""
