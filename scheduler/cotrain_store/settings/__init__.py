"""The settings of each process, free of torch: whoever starts it can read their names."""
