"""Start our processes in milliseconds: they are forked from one that has imported everything they import."""
