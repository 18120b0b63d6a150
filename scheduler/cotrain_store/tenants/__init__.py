"""Tenants and their records: API keys, run lists, usage, audit logs, webhooks."""
