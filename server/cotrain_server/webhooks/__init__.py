"""Delivery of webhook events: addresses, signatures, attempts and retries. Independent of runs."""
