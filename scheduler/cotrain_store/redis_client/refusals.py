"""Classification of transient Redis errors.

redis-py raises the error type of a reply's code. It has no type for some codes. In Redis 6.2 every
error within a script is an `ERR` with the code in its text.
"""

import re

from redis.connection import DefaultParser
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError


class RedisRefuses(ResponseError):
    """Redis refuses writes, or all commands, until its operator or time resolves the cause."""


#: Codes for a script that runs too long, a failing disk, too few replicas and a missing master.
_UNNAMED = ("BUSY", "UNKILLABLE", "MISCONF", "NOREPLICAS")
#: Errors that require an operator: each one is logged.
NEEDS_OPERATOR = (RedisRefuses, ReadOnlyError)
#: Transient errors. redis-py treats LOADING as a lost connection.
REFUSALS = (*NEEDS_OPERATOR, OutOfMemoryError)

_TYPES: dict[str, type[ResponseError]] = {
    **dict.fromkeys(_UNNAMED, RedisRefuses),
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
}
_IN_SCRIPT = re.compile(rf" -({'|'.join(_TYPES)}) ")


def name_refusals() -> None:
    """Register RedisRefuses in redis-py for the codes without a type. Idempotent."""
    DefaultParser.EXCEPTION_CLASSES.update(dict.fromkeys(_UNNAMED, RedisRefuses))


def named(refused: ResponseError) -> ResponseError:
    """Return the error of a script as the exception type of its reply code, if it is transient."""
    code = _IN_SCRIPT.search(str(refused))
    return _TYPES[code[1]](str(refused)) if code else refused
