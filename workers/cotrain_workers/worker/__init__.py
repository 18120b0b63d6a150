"""Worker process: fetches, runs and commits steps, shares its device with sampling, and sends heartbeats."""
