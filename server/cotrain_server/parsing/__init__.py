"""Parsing of large requests, one per tenant at a time, in a thread or a child process."""
