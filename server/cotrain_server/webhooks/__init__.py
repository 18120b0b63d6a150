"""Webhooks: events, addresses, signatures and delivery attempts. Independent of runs."""
