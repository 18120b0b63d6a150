"""The endpoints of the operator, for the admin key alone: tenants, keys, runs, workers, audit."""
