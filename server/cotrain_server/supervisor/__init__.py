"""Supervisor of `cotrain serve`: processes, their environment, and the data folder."""
