"""Records of saved weights and of checkpoints; the files are the worker's."""
