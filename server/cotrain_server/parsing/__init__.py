"""Parsing of large requests without delaying others: one per tenant at a time, in a thread or a
child process.
"""
