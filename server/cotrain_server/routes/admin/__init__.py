"""Endpoints of the operator, for the admin key only: tenants, keys, runs, workers, audit."""
