"""Common operations of the checkpoint scenarios: train, inspect, save, load, list."""

from __future__ import annotations

import os
from typing import Any

import tinker

from tests.conformance.sampling_scenarios import made
from tests.conformance.scenarios import Bench, Facts, batch, logprobs, step

PROJECT = "a-project"
STEPS = 2
"""Steps before the checkpoint, and again after it."""


def seen(run: Any) -> list[list[float]]:
    """Return the log-probs of one batch, as a fingerprint of the run."""
    return logprobs(run.forward(batch(), "cross_entropy").result())


def steps(run: Any, count: int = STEPS) -> Any:
    """Train a few steps, each on a different batch."""
    for number in range(count):
        step(run, batch(number))
    return run


def saved(run: Any, name: str, **options: Any) -> str:
    """Save a run's state under a name."""
    return str(run.save_state(name, **options).result().path)


def from_state(bench: Bench, path: str, **options: Any) -> Any:
    """Start a run from a checkpoint's weights."""
    return made(bench.service.create_training_client_from_state(path, **options))


def from_all_of_state(bench: Bench, path: str, **options: Any) -> Any:
    """Start a run from a checkpoint's weights and optimizer state."""
    return made(bench.service.create_training_client_from_state_with_optimizer(path, **options))


def in_project(bench: Bench) -> Any:
    """Set a project: the SDK requires one as the target of a copy."""
    key = os.environ["TINKER_API_KEY"]
    return tinker.ServiceClient(base_url=bench.base_url, api_key=key, project_id=PROJECT)


def rest_of(bench: Bench) -> Any:
    """Return the client of the REST API."""
    return bench.service.create_rest_client()


def listed(rest: Any, run: Any) -> dict[str, Facts]:
    """List a run's checkpoints as parsed by the SDK, by id."""
    checkpoints = rest.list_checkpoints(run.model_id).result().checkpoints
    return {
        each.checkpoint_id: {
            "type": each.checkpoint_type,
            "path": each.tinker_path,
            "size": each.size_bytes,
            "public": each.public,
            "lives_s": each.expires_at and (each.expires_at - each.time).total_seconds(),
            "user_metadata": getattr(each, "user_metadata", None),
        }
        for each in checkpoints
    }


def run_of(path: str) -> str:
    """Return the id of the run that a checkpoint path belongs to."""
    return path.removeprefix("tinker://").partition("/")[0]


def paths_of(rest: Any, run: str) -> list[str]:
    """List the paths of a run's checkpoints."""
    return [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints]
