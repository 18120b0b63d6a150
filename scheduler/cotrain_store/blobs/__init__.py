"""Bytes under names, durable once put: files below a folder, or objects of a store; knows no run."""
