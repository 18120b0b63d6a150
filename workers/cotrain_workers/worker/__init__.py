"""The process: takes steps, runs and commits them, sends heartbeats; knows no tensors and no files."""
