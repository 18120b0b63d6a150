"""What `cotrain` offers on a server's host: `serve` and `keys`; knows no request."""
