"""The process: takes a step, runs it, commits it, and shows that it lives."""
