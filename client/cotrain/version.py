"""The version of cotrain."""

__version__ = "0.1.0"
