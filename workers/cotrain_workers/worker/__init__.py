"""Worker process: fetches, runs and commits steps, and sends heartbeats. Independent of tensors and files."""
