"""Reads large requests where they hold up no other: one of a tenant at a time, in a thread or in a process of its own."""
