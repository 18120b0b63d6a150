"""HTTP transport to one server: calls, connection pools, retries, files; independent of runs and futures."""
