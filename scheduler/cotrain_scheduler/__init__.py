"""Scheduling policy: the ops and the worker of the next cycle, and its start time."""
