"""HTTP layer around every route: authentication, request bodies, long polls and downloads."""
