from __future__ import annotations

import ast
import importlib.util
import json
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import cotrain
from cotrain import exceptions, types
from cotrain.errors import UnsupportedInput
from cotrain.types import AdamParams, ForwardBackwardOutput, LoraConfig, OptimStepRequest, RequestErrorCategory

# Names of the hosted SDK's types that are left out, and the reason.
LEFT_OUT = {
    "no telemetry is sent": {
        "EventType",
        "SessionEndEvent",
        "SessionStartEvent",
        "Severity",
        "TelemetryBatch",
        "TelemetryEvent",
        "TelemetrySendRequest",
        "UnhandledExceptionEvent",
    },
    "the rule of dimuon is not published in full": {"DimuonOptimizerConfig", "DimuonParams"},
    "one class with a `state` here, FutureCompletion": {"FutureFailed", "FutureFinished"},
    "one class with a `type` here, ClientSessionFinishReason": {
        "ClientSessionFinishErrored",
        "ClientSessionFinishInterrupted",
        "ClientSessionFinishSuccess",
    },
    "arguments of a GET": {"GetBillingUsageRequest", "GetCurrentCheckpointStorageUsageRequest"},
    "a sampler's copies number themselves": {"JoinSamplingSessionRequest", "JoinSamplingSessionResponse"},
    "the server computes no such thing": {
        "PromptAltTokens",
        "PromptProvenanceSpan",
        "ProvenanceSpans",
        "SampledProvenanceSpan",
    },
    "the server never says so": {
        "SessionCancelled",
        "SessionFailedRequestReason",
        "SessionFailedSamplingSessionReason",
        "StorageBillingEvent",
    },
}


def names_of_the_sdk(module: str) -> set[str]:
    """Return the names that a module of the installed official SDK exports, without importing it."""
    spec = importlib.util.find_spec("tinker")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    content = (Path(spec.submodule_search_locations[0]) / module).read_text()
    imports = [node for node in ast.parse(content).body if isinstance(node, ast.ImportFrom)]
    aliases = chain.from_iterable(node.names for node in imports if node.level)
    return {alias.asname or alias.name for alias in aliases}


def test_every_type_of_the_hosted_sdk_exists_here_or_has_a_reason() -> None:
    left_out = set().union(*LEFT_OUT.values())
    missing = names_of_the_sdk("types/__init__.py") - set(types.__all__)
    assert missing == left_out


def test_every_exported_type_exists_and_is_listed_once() -> None:
    assert len(types.__all__) == len(set(types.__all__))
    assert all(hasattr(types, name) for name in types.__all__)


def test_every_type_has_a_docstring() -> None:
    classes = [getattr(types, name) for name in types.__all__]
    models = [c for c in classes if isinstance(c, type) and issubclass(c, BaseModel)]
    assert len(models) > 80
    assert [model.__name__ for model in models if not model.__doc__] == []


def test_the_base_error_names_catch_every_error() -> None:
    for name in ("TinkerError", "BiosAPIError", "MintAPIError"):
        caught = getattr(exceptions, name)
        for error in exceptions.__all__:
            assert issubclass(getattr(exceptions, error), caught)


def test_every_error_of_the_package_is_exported_by_exceptions() -> None:
    errors = {
        name
        for name, value in vars(cotrain.errors).items()
        if isinstance(value, type) and issubclass(value, cotrain.CotrainError)
    }
    assert errors <= set(exceptions.__all__)


def test_a_category_equals_its_text() -> None:
    failure = cotrain.RequestFailed("no", "r1", "user")
    assert failure.category in set(RequestErrorCategory)
    assert str(RequestErrorCategory.User) == failure.category


# ---- Objects that a caller makes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: AdamParams(lr=1e-3), "AdamParams has no lr; it has learning_rate, beta1"),
        (lambda: LoraConfig(r=8), "LoraConfig has no r; it has rank"),
    ],
)
def test_a_misspelt_field_is_refused(made: Callable[[], object], words: str) -> None:
    with pytest.raises(UnsupportedInput, match=words):
        made()


def test_unknown_fields_of_a_newer_client_are_ignored() -> None:
    sent = {"model_id": "a", "seq_id": 1, "adam_params": {"learning_rate": 0.5, "newer": 1}}
    read = OptimStepRequest.model_validate(sent).adam_params
    assert read == OptimStepRequest.model_validate_json(json.dumps(sent)).adam_params
    assert read == pickle.loads(pickle.dumps(read)) == AdamParams(learning_rate=0.5)


# ---- LoRA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dropout", 0.1, "dropout is not implemented; use 0"),
        ("alpha", 0, "greater than 0"),
        ("alpha", 655_361, "less than or equal to 655360"),
        ("alpha", float("nan"), "finite number"),
        ("alpha", float("inf"), "finite number"),
    ],
)
def test_an_invalid_lora_config_is_refused_by_field(field: str, value: float, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:
        LoraConfig(**{field: value})
    assert refused.value.errors()[0]["loc"] == (field,)


def test_lora_defaults_are_those_of_the_hosted_services() -> None:
    assert (LoraConfig().rank, LoraConfig().alpha, LoraConfig().dropout) == (32, 32.0, 0.0)
    assert LoraConfig(alpha=16, dropout=0).alpha == 16.0


# ---- result.loss ---------------------------------------------------------------------------------


def output(**metrics: float) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[], metrics=metrics)


def test_the_loss_is_a_mean_per_weight_if_the_weights_are_known() -> None:
    result = output(**{"loss:sum": 6.0})
    assert result.loss == 6.0
    assert result.with_total_weight(4.0).loss == 1.5
    assert result.with_total_weight(4.0).metrics == {"loss:sum": 6.0}
    assert result.loss == 6.0


@pytest.mark.parametrize("total_weight", [0.0, -2.0])
def test_the_loss_is_a_sum_if_the_total_weight_is_not_positive(total_weight: float) -> None:
    assert output(**{"loss:sum": 6.0}).with_total_weight(total_weight).loss == 6.0
