"""Programs of tinker_cookbook against one real server, which ends with the last test of this folder."""
