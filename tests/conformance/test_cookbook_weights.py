"""Merging and converting our exports with `tinker_cookbook.weights` gives what plain PEFT gives."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

import pytest

from tests.conformance.running import ROOT
from tests.warm.popen import run

COOKBOOK = ROOT / ".sdk" / "tinker_cookbook-0.6.1" / "site-packages"
#: fp32, and the sum `W + scale * B @ A` is rounded once more when it is merged.
TOLERANCE = 1e-5

#: One matrix is both embedding and unembedding: no merged model can hold LoRA on one of them alone.
IMPOSSIBLE = {"tied everything merged", "tied unembedding merged"}


@pytest.fixture(scope="module")
def distances() -> Mapping[str, float | str]:
    if not COOKBOOK.exists():
        pytest.fail("tinker_cookbook is missing: run tests/cookbook/fetch.sh")
    roots = [ROOT, *(ROOT / name for name in ("client", "scheduler", "server", "workers"))]
    done = run(
        [sys.executable, "-m", "tests.conformance.cookbook_weights"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*roots, COOKBOOK]))},
    )
    assert done.returncode == 0, done.stderr
    found: Mapping[str, float | str] = json.loads(done.stdout)
    return found


def test_an_export_merges_and_converts_to_the_same_function(distances: Mapping[str, float | str]) -> None:
    far = {case: far for case, far in distances.items() if isinstance(far, str) or far > TOLERANCE}
    assert set(far) == IMPOSSIBLE
    assert len(distances) == 14


def test_what_cannot_be_merged_is_refused_and_not_merged_wrongly(distances: Mapping[str, float | str]) -> None:
    for case in IMPOSSIBLE:
        assert "lm_head.weight" in str(distances[case])
