"""Waiting for results, and knowing which of them were delivered."""
