"""Waits for results, notices for those that wait, and the delivery of results."""
