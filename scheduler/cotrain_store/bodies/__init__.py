"""The bodies of ops, bytes to arrays and back; knows no queue and no engine."""
