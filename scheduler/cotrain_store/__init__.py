"""The contract between our processes: messages, keys, scripts, the body spool and the records.

The server, the scheduler and the workers meet here and nowhere else. This package knows what is
stored and which moves are atomic; it does not know HTTP, planning policy or tensors.
"""
