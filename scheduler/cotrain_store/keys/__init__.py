"""Redis keys, each a typed template with its owner and the reason for its lifetime.

`{pool}` is a hash tag: all keys of one pool would be stored on one node of a cluster. The scripts
build no key that is not made here: they receive the pool's prefix and append the same suffixes.
"""
