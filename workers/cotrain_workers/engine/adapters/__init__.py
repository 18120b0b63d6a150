"""Adapters as arenas, on the device or off it: made, loaded, mixed, offloaded."""
