"""Who looks at a page: login, its cookie, and the token without which no form is taken."""
