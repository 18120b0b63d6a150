"""Official SDKs and our own client against one real server, which ends with the last test of this folder."""
