"""Scenario `python -m bench sweep`: time and bytes of a sweep, and of successive halving."""
