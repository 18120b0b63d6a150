"""Operation log of runs. Ops are accepted, planned, executed, committed and rolled back."""
