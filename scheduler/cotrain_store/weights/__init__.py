"""Records of saved weights and of checkpoints. Workers handle the files."""
