"""`cotrain admin`: what the operator asks of a server and changes, by its admin API."""
