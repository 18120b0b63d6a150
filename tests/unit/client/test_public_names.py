"""Public names of the client, which stay importable whatever moves behind them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import cotrain
from tests.support.markdown import blocks

ROOT = Path(__file__).parents[3]
MODULES = {
    "cotrain",
    "cotrain.cli",
    "cotrain.data",
    "cotrain.errors",
    "cotrain.exceptions",
    "cotrain.learning_rates",
    "cotrain.losses",
    "cotrain.mint",
    "cotrain.settings",
    "cotrain.types",
    "cotrain.version",
}
NAMES = """
__version__ AdamOptimizerConfig AdamParams AdminClient APIConnectionError APIError APIFuture
APIResponseValidationError APIStatusError APITimeoutError AuthenticationError BadRequestError
BillingError BiosAPIError Checkpoint CheckpointNotFound CheckpointType ClientClosed ConflictError
CotrainError data Datum DmelChunk EncodedTextChunk Evaluation exceptions ExportFailed ForeignAnswer ForwardBackwardOutput Future
InternalServerError learning_rates LibraryMissing LoraConfig losses MalformedMessage mint MintAPIError ModelID ModelInput ModelInputChunk
NotFoundError OptimParams OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath
PermissionDeniedError RateLimitError RequestFailed RequestFailedError RestClient RetryPolicy
RoutedExperts SampledSequence SampleRequest SampleResponse SamplingClient SamplingParams ServiceClient
SettingsMissing StopReason Submitted Sweep SweepOutput TensorData TensorDtype TinkerError TokenizerMissing
TorchMissing TrainingClient TrainingRun TrainOutput Trial types UnprocessableEntityError
UnsupportedInput VersionMismatch
"""


def test_every_public_module_can_be_imported() -> None:
    for module in MODULES:
        importlib.import_module(module)


def test_the_package_exports_these_names() -> None:
    assert sorted(cotrain.__all__) == sorted(NAMES.split())
    assert all(hasattr(cotrain, name) for name in cotrain.__all__)
    assert set(cotrain.__all__) <= set(dir(cotrain))
    assert (cotrain.AdminClient, cotrain.APIFuture) == (cotrain.RestClient, cotrain.Future)
    with pytest.raises(AttributeError, match="'cotrain' has no attribute 'Datums'"):
        _ = cotrain.Datums  # type: ignore[attr-defined]


def test_the_docs_and_examples_import_only_from_public_modules() -> None:
    found = imported_names()
    assert len(found) > 20
    assert {module for module, _ in found} <= MODULES
    missing = [each for each in found if not _is_there(*each)]
    assert missing == []


def imported_names() -> set[tuple[str, str]]:
    """Return the names that the docs and examples import from the client, each with its module."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [block.source for page in pages for block in blocks(page)]
    sources += [file.read_text(encoding="utf-8") for file in (ROOT / "examples").glob("*.py")]
    return {
        (node.module, name.name)
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "cotrain"
        for name in node.names
    }


def _is_there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name)
