"""Micro-batches, log-prob head, losses, AdamW: from a batch to stepped weights."""
