"""Saved weights and their files in PEFT's format, independent of steps and resident runs."""
