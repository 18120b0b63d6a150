"""One server over HTTP: calls, connection pools, retries, files; knows no run and no future."""
