"""Messages between processes: ops, plans, results and records, as frozen dataclasses.

JSON written by one version is read by the next one, which ignores unknown fields. A rolling upgrade
therefore loses nothing.
"""
