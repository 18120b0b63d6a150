"""Sample requests, which stand outside the log: accepted, claimed, resolved."""
