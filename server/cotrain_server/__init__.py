"""The HTTP front end and the supervisor: what tenants and operators talk to.

Checks everything a client sends before it is accepted, hands it to the store, and answers from the
store. It knows HTTP and processes; it knows no Redis command, no planning policy and no tensor.
"""
