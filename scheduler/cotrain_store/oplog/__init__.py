"""A run's operation log: accepted, planned, executed, committed, rolled back."""
