"""Expectation of a refusal by its reason."""

from __future__ import annotations

import pytest

from cotrain_store.errors import Reason, Refused


def refused(*reasons: Reason, match: str | None = None) -> pytest.RaisesExc[Refused]:
    """Expect a refusal with one of these reasons."""
    return pytest.raises(Refused, match=match, check=lambda error: error.reason in reasons)
