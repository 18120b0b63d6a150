"""Continuous batching of sample requests: pages, scheduler, runner, token choice."""
