"""Benchmarks: `python -m bench` lists them, one file each; their parts lie in the rooms below."""
