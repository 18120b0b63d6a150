"""Access to pages: login, session cookie, and the CSRF token of forms."""
