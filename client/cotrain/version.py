"""The version of cotrain."""

__version__ = "0.1.0"

PROTOCOL = 1
"""Counts changes after which a client and a server of this project misread each other."""
