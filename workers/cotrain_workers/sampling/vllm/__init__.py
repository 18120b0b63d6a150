"""Sampler on a vLLM server: its client, its adapters, and the decoder. Independent of Redis."""
