"""Decode scheduling: choice of the sequences that run in a step, and preemption. No tensors."""
