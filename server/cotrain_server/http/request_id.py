"""What a request is called in its answer, in the log and in traces: as its client called it, or a name of ours."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

from cotrain_store.monitoring.logs import looks_like_key

if TYPE_CHECKING:
    from collections.abc import Iterable

HEADER = b"x-request-id"
#: What may stand in a line of a log, in a header and in a shell without being more than a name.
_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Take over the `X-Request-Id` of a request where it is 1 to 64 safe characters, and no key; else make one."""
    given = [value.decode("latin-1") for name, value in headers if name == HEADER]
    if len(given) == 1 and _SAFE.fullmatch(given[0]) and not looks_like_key(given[0]):
        return given[0]
    return secrets.token_hex(8)
