"""Benchmarks: `python -m bench` lists them, one file each; their parts are in the folders below."""
