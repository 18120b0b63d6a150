"""Waits for results, and the record of delivered ones."""
