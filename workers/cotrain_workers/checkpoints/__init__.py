"""Saved weights and their files, in PEFT's format; knows no step and no run in memory."""
