"""Conversion of downloaded adapters for other programs, with a comparison of the results.

Needs the extra `export`. No module here imports torch when it is imported, so the client starts without it.
"""
