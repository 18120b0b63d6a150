"""`cotrain serve`: processes, their environment, the data folder; knows no request."""
