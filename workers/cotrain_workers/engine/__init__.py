"""Training and sampling of many adapters in one pass, with torch, transformers, safetensors, numpy and Pillow only."""
