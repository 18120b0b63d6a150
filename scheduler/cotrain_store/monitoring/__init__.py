"""Status, metrics and logs for the operator. They do not change runs."""
