"""Client classes of the public API. They define the requests; `requests` and `transport` send them."""
