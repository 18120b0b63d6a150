"""A vLLM server as the sampler: its protocol, and whether its answers are right; knows no Redis."""
