"""A server that serves the model of the workshop, and stays without complaint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cookbook.programs import Bench
from tests.cookbook.workshop import BASE_MODEL, build_workshop
from tests.support.serving import Serving

KEY = "tml-cook_c2VjcmV0LW9mLWNvb2s"


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """`cotrain serve`, and a workshop beside it."""
    workshop = build_workshop(tmp_path_factory.mktemp("workshop"))
    data = tmp_path_factory.mktemp("data")
    logs = tmp_path_factory.mktemp("logs")
    with Serving(data, [f"{BASE_MODEL}={workshop / BASE_MODEL}"], [KEY]) as serving:
        yield Bench(serving.address, KEY, data, workshop, logs)


@pytest.fixture(scope="module")
def bench(server: Bench) -> Iterator[Bench]:
    """The server; a module during which it complained has failed."""
    before = server.complaints()
    yield server
    assert server.complaints() == before
