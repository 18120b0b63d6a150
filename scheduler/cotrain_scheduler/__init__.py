"""Policy: which ops run in the next cycle, on which worker, and when a cycle starts."""
