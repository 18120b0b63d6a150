"""Validation of an uploaded, untrusted archive, and its conversion to an adapter."""
