"""One worker of several processes, its members, which hold a base model together; knows no Redis and no files of runs."""
