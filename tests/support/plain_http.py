"""Clients of servers on this host, which speak plain HTTP."""

from __future__ import annotations

import ssl

#: As `verify`: it believes in no certificate. To read those that a host trusts takes 20 ms for each client.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
