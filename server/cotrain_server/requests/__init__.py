"""From the wire to an op, and whether it may be accepted; pure, no Redis, no HTTP."""
