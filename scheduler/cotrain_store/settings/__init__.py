"""Settings of each process, without an import of torch, because the supervisor reads their names."""
