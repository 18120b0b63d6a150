"""Chat programs of others, run unmodified against a server; `make compatibility` writes their results."""
