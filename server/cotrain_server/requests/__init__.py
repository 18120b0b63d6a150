"""Requests from the wire format to an accepted op in the log. Independent of routes."""
