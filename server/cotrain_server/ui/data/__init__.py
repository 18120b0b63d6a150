"""From what the store holds to what a page shows: pure functions, the same for the operator and a tenant."""
