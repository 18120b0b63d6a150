"""What crosses a process: ops, plans, results and records, as plain frozen data.

JSON written by one version is read by the next one (unknown fields are ignored), so that a rolling
upgrade loses nothing.
"""
