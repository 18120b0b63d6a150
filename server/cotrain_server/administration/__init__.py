"""Tenants for the operator: keys, limits and their use, for routes and pages."""
