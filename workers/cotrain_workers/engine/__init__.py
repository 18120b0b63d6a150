"""Many adapters in one pass over a frozen model; torch, transformers, safetensors, numpy and nothing of ours outside."""
