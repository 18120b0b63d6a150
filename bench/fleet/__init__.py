"""A pool in virtual time: the real scheduler over workers and clients that are only events."""
