"""The settings of each process, free of torch: the supervisor reads their names."""
