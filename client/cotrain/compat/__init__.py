"""Compatibility with names and arguments of the hosted SDKs, without network code."""
