"""What this process alone counts, and refuses when it is too much."""
