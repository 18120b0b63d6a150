"""Files that survive a power cut: spool, large results, who owns the folder, how full it is."""
