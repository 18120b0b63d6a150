"""Clients of servers on this host over plain HTTP."""

from __future__ import annotations

import ssl

#: Value of `verify` without any certificate. Reading the certificates of a host takes 20 ms per client.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
