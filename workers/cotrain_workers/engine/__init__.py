"""Many adapters in one pass over a frozen model; torch, transformers, peft, safetensors, numpy and nothing of ours outside."""
