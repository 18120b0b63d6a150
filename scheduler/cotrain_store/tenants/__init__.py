"""Who asks, and what belongs to whom: keys, records, lists, usage, audit."""
