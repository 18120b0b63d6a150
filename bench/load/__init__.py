"""The server's own limits, with a worker that computes nothing."""
