"""Storage of bytes by name, durable once put, as files of a folder or objects of a store. Independent of runs."""
