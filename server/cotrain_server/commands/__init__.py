"""Commands of `cotrain` on a server's host, such as `serve` and `keys`. Independent of requests."""
