"""JSON of any values from tenants: numbers that JSON does not have become null."""

import json
from typing import Any

import pytest

from cotrain_server.http.responses import FiniteJSONResponse, finite, finite_json
from cotrain_server.text_apis.answers import event
from cotrain_server.ui.rendering import _environment

INFINITE: dict[str, Any] = {"a": [1.5, float("inf"), {"b": float("nan")}], "c": -1e999, "d": "NaN"}
FINITE = {"a": [1.5, None, {"b": None}], "c": None, "d": "NaN"}


def strict(text: str | bytes) -> Any:
    """Parse JSON as strictly as other languages."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_infinities_and_nan_become_null() -> None:
    assert strict(finite_json(INFINITE)) == FINITE
    assert strict(bytes(FiniteJSONResponse(INFINITE).body)) == FINITE
    assert strict(event(INFINITE).removeprefix("data: ")) == FINITE
    shown = _environment.from_string("{{ value|tojson }}").render(value=INFINITE)
    assert strict(shown) == FINITE


def test_values_that_json_supports_are_unchanged() -> None:
    value = {"n": 10**300, "f": 5e-324, "t": "\ud800 é", "b": [True, None, "<"]}
    assert strict(finite_json(value)) == value


@pytest.mark.parametrize("number", [10**309, -(10**309), 1e999, float("nan")])
def test_a_number_out_of_the_range_of_a_double_is_null(number: float) -> None:
    assert finite([{"x": number}]) == [{"x": None}]
