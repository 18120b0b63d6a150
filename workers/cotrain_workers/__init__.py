"""The engine that trains many adapters in one pass over a frozen base model, and the worker around it.

Everything below `loop.py` needs torch, transformers, peft, safetensors and numpy only, so it runs
and is measured on a bare GPU machine.
"""
