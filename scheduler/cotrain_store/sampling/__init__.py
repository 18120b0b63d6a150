"""Sample requests, which are not in the log. They are accepted, claimed and resolved."""
