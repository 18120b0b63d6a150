"""Adapters as arenas on the device or the host: creation, load, combination, offload."""
