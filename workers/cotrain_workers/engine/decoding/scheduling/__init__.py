"""Which sequences of which tenant run in a step, and who gives way: bookkeeping, no tensors."""
