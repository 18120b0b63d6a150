"""What every request passes before and after its route: key, body, long poll, download."""
