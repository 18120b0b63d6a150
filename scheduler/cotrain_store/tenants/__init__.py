"""Tenants and their records: API keys, lists and histories of runs, policies, audit logs, webhooks."""
