"""Limits that one process counts and enforces on its own."""
