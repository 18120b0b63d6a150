"""OpenAPI schemas of bodies that routes parse without the framework."""

import json

import pytest

from cotrain.types import ForwardBackwardRequest, OptimStepRequest, SampleRequest
from cotrain.wire.codec import PROTOBUF
from cotrain_server.http.tenant_routes import body_of


@pytest.mark.parametrize("model", [ForwardBackwardRequest, OptimStepRequest, SampleRequest])
def test_a_schema_refers_to_nothing_outside_itself(model: type[SampleRequest]) -> None:
    text = json.dumps(body_of(model))
    assert "$ref" not in text
    assert "$defs" not in text


def test_a_reference_is_replaced_by_its_target() -> None:
    schema = body_of(SampleRequest)["requestBody"]["content"]["application/json"]["schema"]
    assert "temperature" in schema["properties"]["sampling_params"]["properties"]


def test_protobuf_is_offered_only_where_it_is_accepted() -> None:
    assert PROTOBUF in body_of(ForwardBackwardRequest, binary=True)["requestBody"]["content"]
    assert PROTOBUF not in body_of(OptimStepRequest)["requestBody"]["content"]
