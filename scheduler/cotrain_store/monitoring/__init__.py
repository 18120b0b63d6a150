"""What an operator reads: status, metrics, logs; nothing here changes a run."""
