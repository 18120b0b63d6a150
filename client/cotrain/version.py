"""The version of cotrain."""

__version__ = "0.1.0"

PROTOCOL = 1
"""Protocol version, incremented by every incompatible change between client and server."""
