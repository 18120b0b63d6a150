"""Commands `cotrain admin`: operation of a server through its admin API."""
