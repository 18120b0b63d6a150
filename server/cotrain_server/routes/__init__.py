"""Endpoints, one file per subject. A route translates between the wire format and the store."""
