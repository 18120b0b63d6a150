"""Tenants and their records: API keys, lists and histories of runs, policies, usage, audit logs, webhooks."""
