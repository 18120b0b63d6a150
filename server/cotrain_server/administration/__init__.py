"""Validated and audited changes by the operator, independent of routes and pages."""
