"""Status, metrics and logs for an operator; nothing here changes a run."""
