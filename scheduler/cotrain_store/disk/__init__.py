"""Files that survive a power cut: spool, bodies and results in it, and the embedded Redis. Also the check of free space."""
