"""HTTP front end and supervisor, the interface of tenants and operators.

The front end validates every request, passes it to the store, and answers from the store. It
contains HTTP and process handling, but no Redis commands, no planning policy and no tensors.
"""
