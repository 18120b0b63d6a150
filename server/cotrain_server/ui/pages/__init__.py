"""Pages, one per file: a function reads the data, a route shows it."""
