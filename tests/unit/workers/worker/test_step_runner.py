from __future__ import annotations

import numpy as np

from cotrain_store.messages.runs import PassEntry, StepEntry
from cotrain_workers.engine.ops import (
    Datum,
    Failure,
    KlDatum,
    OptimStep,
    Output,
    Pass,
    PassOutput,
    ReverseKl,
    ReverseKlOutput,
    Save,
    StepOutput,
)
from cotrain_workers.worker.step_runner import history_by

STEP = OptimStep("a", 2, 1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


def a_pass(needs_grad: bool, **inputs: list[float]) -> Pass:
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    datum = Datum(np.arange(3), {"target_tokens": np.arange(3), **arrays})
    return Pass("a", 1, [datum, datum], "any", {}, needs_grad=needs_grad)


def test_only_passes_and_steps_have_history_entries() -> None:
    outputs: dict[tuple[str, int], Output] = {
        ("a", 1): PassOutput([], 0.1),
        ("a", 2): StepOutput(0.3),
    }
    training = a_pass(needs_grad=True, weights=[0.1, 0.0, -2.0])
    weight = 2 * (float(np.float32(0.1)) - 2.0)
    assert history_by([training, STEP, Save("a", 3)], outputs) == {
        ("a", 1): PassEntry(0.1, weight, is_forward=False),
        ("a", 2): StepEntry(0.3, 1e-4),
    }
    evaluation = a_pass(needs_grad=False, weights=[1.0, 1.0, 1.0])
    assert history_by([evaluation], outputs) == {("a", 1): PassEntry(0.1, 6.0, is_forward=True)}


def test_without_weights_targets_with_an_advantage_are_counted() -> None:
    policy = a_pass(needs_grad=True, logprobs=[0.0, 0.0, 0.0], advantages=[-0.5, 0.0, 2.0])
    [entry] = history_by([policy], {("a", 1): PassOutput([], 0.1)}).values()
    assert entry == PassEntry(0.1, 4.0, is_forward=False)


def test_the_weights_of_a_reverse_kl_are_counted() -> None:
    datum = KlDatum(np.arange(3), np.arange(3), np.array([0.5, 0.0], np.float32))
    request = ReverseKl("a", 1, [datum], None, 1.0)
    found = history_by([request], {("a", 1): ReverseKlOutput([], 0.25, 0.5, 1)})
    assert found == {("a", 1): PassEntry(0.25, 0.5, is_forward=False)}


def test_failed_open_and_infinite_results_have_no_history_entry() -> None:
    training = a_pass(needs_grad=True, weights=[1.0])
    failed: dict[tuple[str, int], Output] = {("a", 1): Failure("no", "user")}
    assert history_by([training, STEP], failed) == {}
    endless: dict[tuple[str, int], Output] = {("a", 1): PassOutput([], float("inf"))}
    assert history_by([training], endless) == {}
