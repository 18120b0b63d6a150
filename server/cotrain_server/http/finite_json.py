"""JSON of values that may contain tenants' data: without NaN and infinity, which JSON lacks."""

import json
import math
from typing import Any

from fastapi.responses import JSONResponse
from typing_extensions import override


class FiniteJSONResponse(JSONResponse):
    """JSON response for any numbers and texts."""

    @override
    def render(self, content: Any) -> bytes:
        """Return the content as JSON."""
        return finite_json(content).encode()


def finite_json(value: Any) -> str:
    """Return compact JSON in ASCII, which can also represent half a surrogate pair. NaN and
    infinities become null.
    """
    try:
        return _written(value)
    except ValueError:
        return _written(finite(value))


def finite(value: Any) -> Any:
    """Return a JSON value with None for each number that `is_double` refuses."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value if is_double(value) else None


def _written(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def is_double(value: Any) -> bool:
    """Return True if a value is not a number, or is within the range of a double."""
    if not isinstance(value, int | float):
        return True
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
