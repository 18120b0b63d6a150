"""Which error replies of Redis pass: it takes no writes, or nothing at all, for now.

A command has its reply's code as the type of its error. redis-py gives some codes no type, and for Redis 6.2
every error within a script is an `ERR` with the code in its text.
"""

from __future__ import annotations

import re

from redis.connection import DefaultParser
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError


class RedisRefuses(ResponseError):
    """Redis takes no writes, or nothing, until its operator or time has helped."""


#: A script runs for too long; the disk fails; too few replicas; a master that is not there.
_UNNAMED = ("BUSY", "UNKILLABLE", "MISCONF", "NOREPLICAS")
#: What an operator has to look at: worth a line in the log each time.
NEEDS_OPERATOR = (RedisRefuses, ReadOnlyError)
#: What passes. LOADING is a lost connection to redis-py.
REFUSALS = (*NEEDS_OPERATOR, OutOfMemoryError)

_TYPES: dict[str, type[ResponseError]] = {
    **dict.fromkeys(_UNNAMED, RedisRefuses),
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
}
_IN_SCRIPT = re.compile(rf" -({'|'.join(_TYPES)}) ")


def name_refusals() -> None:
    """Have redis-py raise RedisRefuses for the codes it has no type for. Twice is harmless."""
    DefaultParser.EXCEPTION_CLASSES.update(dict.fromkeys(_UNNAMED, RedisRefuses))


def named(refused: ResponseError) -> ResponseError:
    """Give the error of a script the type of its reply's code, where that passes."""
    code = _IN_SCRIPT.search(str(refused))
    return _TYPES[code[1]](str(refused)) if code else refused
