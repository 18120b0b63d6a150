"""Clients of an API in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cotrain import ServiceClient, TrainingClient
from tests.support.fake_api import FakeApi


@pytest.fixture
def api() -> FakeApi:
    """The API, whose answers a test chooses."""
    return FakeApi()


@pytest.fixture
def service(api: FakeApi) -> Iterator[ServiceClient]:
    """A client of this API."""
    with ServiceClient("http://server", "tml-key", network=api.network) as client:
        yield client


@pytest.fixture
def run(service: ServiceClient) -> TrainingClient:
    """A training run of this client."""
    return service.create_lora_training_client("m")
