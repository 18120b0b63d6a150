"""Files that survive a power cut: spool, large results, and the repair of Redis' log. Also the check of free space."""
