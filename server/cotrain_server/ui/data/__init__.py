"""Conversion of stored records to page data: pure functions, shared by the operator and tenants."""
