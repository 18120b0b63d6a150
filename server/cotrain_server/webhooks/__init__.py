"""Webhooks: what tenants are notified of, where, signed how, and how often it is tried; knows no run."""
