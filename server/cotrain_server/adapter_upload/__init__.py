"""An uploaded archive, trusted in nothing, until it is an adapter."""
