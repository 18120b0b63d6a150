"""Shared parts of the benchmarks: models, machines, times, and servers that end with the program."""
