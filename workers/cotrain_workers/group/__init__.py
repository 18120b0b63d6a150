"""Worker of several processes (members) that share a base model. Independent of Redis and of the files of runs."""
