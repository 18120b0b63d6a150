"""From the wire to an op, whether it may be accepted, and its way into the log; knows no route."""
