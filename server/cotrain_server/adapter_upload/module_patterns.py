"""Match a tenant's regular expressions against names of modules, in a process that can be ended.

Python's `re` may run without end for a short pattern, and holds the interpreter's lock while it does.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

from cotrain_server.errors import Invalid

#: Of the process that matches; ordinary patterns take milliseconds.
CPU_S = 1
WALL_S = 20
MEMORY_BYTES = 512 * 1024**2
MAX_PATTERNS = 1000

#: Reads patterns and names; writes, for each name, the number of the first pattern that fits, or null.
_PROGRAM = f"""
import contextlib, json, re, sys
with contextlib.suppress(ImportError, ValueError, OSError):
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
method, patterns, names = json.load(sys.stdin)
try:
    matches = [getattr(re.compile(pattern), method) for pattern in patterns]
except (re.error, OverflowError, RecursionError):
    sys.exit(3)
first = [next((i for i, each in enumerate(matches) if each(name)), None) for name in names]
json.dump(first, sys.stdout)
"""
_NO_PATTERN = 3


def first_matches(
    subject: str, method: Literal["match", "fullmatch"], patterns: Sequence[str], names: Sequence[str]
) -> list[int | None]:
    """Return for each name the number of the first pattern that fits by this method of `re`, or None.

    `subject` begins the sentence that refuses the patterns. Raises Invalid.
    """
    if len(patterns) > MAX_PATTERNS:
        raise Invalid(f"{subject} has more than {MAX_PATTERNS} regular expressions.")
    try:
        done = subprocess.run(  # noqa: S603  # ourselves, without a shell
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([method, patterns, names]).encode(),
            capture_output=True,
            timeout=WALL_S,
            env={},
            check=False,
        )
    except subprocess.TimeoutExpired as slow:
        raise _too_slow(subject) from slow
    if done.returncode == _NO_PATTERN:
        raise Invalid(f"{subject} contains an invalid regular expression.")
    if done.returncode:
        raise _too_slow(subject)
    found: list[int | None] = json.loads(done.stdout)
    return found


def _too_slow(subject: str) -> Invalid:
    return Invalid(
        f"{subject}: its regular expressions take too long to match; give names of modules, or simpler ones."
    )
