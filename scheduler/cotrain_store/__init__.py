"""Contract between the processes: messages, keys, scripts, the body spool and the records.

The server, the scheduler and the workers communicate only through this package. It defines the
stored data and the atomic operations. It has no HTTP, planning policy or tensors.
"""
