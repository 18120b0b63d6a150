"""Training and sampling of many adapters in one pass over a frozen model. Depends on torch, transformers, safetensors
and numpy only.
"""
