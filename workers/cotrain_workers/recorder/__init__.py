"""The flight recorder: cycles as files, and `cotrain replay`; knows no Redis."""
