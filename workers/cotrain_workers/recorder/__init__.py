"""Flight recorder: cycles as files, and `cotrain replay`. Independent of Redis."""
